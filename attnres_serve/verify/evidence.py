"""The loss of the float64 model on texts, under each reading of a config.json.

Two readings predict the same tokens, so their losses are compared token by token.  The losses of
neighbouring tokens are correlated, so the sample is the means of ``CHUNK`` neighbours, and
Student's t bounds the mean difference.  A text counts only if some reading predicts it better than
the frequencies of its tokens: otherwise the weights are untrained, or were trained on texts of
another kind, and a smaller loss would only mean less confidence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol

from attnres_serve.bench.ratios import student_quantile
from attnres_serve.verify.readings import Reading

if TYPE_CHECKING:
    from torch import Tensor

    from attnres_serve.verify import oracle

CHUNK = 16  # tokens
FEWEST = 1 + 4 * CHUNK  # tokens of a text
LEAST = 0.01  # nats a token, one per cent: closer readings count as equal
RISK = 1e-3  # of one false warning over all readings, if they were equally good


class Model(Protocol):
    """A float64 model that can mix by another specification."""

    spec: "oracle.Spec"

    def with_spec(self, spec: "oracle.Spec") -> "Model": ...

    def logprobs(self, ids: Sequence[int]) -> "Tensor": ...


@dataclass(frozen=True)
class Evidence:
    """The losses under all readings, in nats a token, and the conclusion.

    Attributes:
        reading: the name of the served reading.
        tokens: number of predicted tokens in the texts that count, or in all if none does.
        loss: their loss under the served reading.
        guess: their loss by their frequencies in each text, which a model does not know.
        others: the loss under other readings, by name.
        warning: a sentence about the best reading that is better by more than the noise.
        alike: names of readings that are not worse by more than the noise.
        is_told: whether a text counts; otherwise there is no conclusion.
    """

    reading: str
    tokens: int
    loss: float
    guess: float
    others: dict[str, float] = field(default_factory=dict)
    warning: str | None = None
    alike: list[str] = field(default_factory=list)
    is_told: bool = False


def measure(
    model: Model,
    readings: Sequence[Reading],
    texts: Sequence[Sequence[int]],
    step: Callable[[], Any] = lambda: None,
) -> Evidence:
    """Evaluate texts under every reading.

    Args:
        model: the model of the checkpoint.
        readings: the served reading, and the others.
        texts: the token ids of each text, at least ``FEWEST``.
        step: called after every evaluation.
    """
    losses: dict[Reading, list[Tensor]] = {}
    for reading in readings:
        spec = replace(model.spec, block_starts=reading.starts, final_mix=reading.final_mix)
        changed = model.with_spec(spec)
        losses[reading] = []
        for ids in texts:
            losses[reading].append(_losses(changed, ids))
            step()
    guesses = [_guess(ids) for ids in texts]
    counted = [
        number
        for number, guess in enumerate(guesses)
        if min(by_text[number].mean().item() for by_text in losses.values()) < guess
    ]
    return _conclusion(losses, guesses, counted)


def _losses(model: Model, ids: Sequence[int]) -> "Tensor":
    """The negative logprob of every token after the first."""
    import torch

    nexts = torch.tensor(ids[1:])[:, None]
    return -model.logprobs(ids)[:-1].gather(1, nexts).flatten()


def _guess(ids: Sequence[int]) -> float:
    """The least loss of a model that predicts each token with a constant probability."""
    import torch

    counts = torch.tensor(ids[1:]).bincount().double()
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log()).sum().item()


def _conclusion(
    losses: Mapping[Reading, Sequence["Tensor"]], guesses: Sequence[float], counted: Sequence[int]
) -> Evidence:
    import torch

    shown = counted or range(len(guesses))
    sizes = [len(next(iter(losses.values()))[number]) for number in shown]
    means = {
        reading: torch.cat([by_text[number] for number in shown]).mean().item()
        for reading, by_text in losses.items()
    }
    served, *others = losses
    guess = sum(size * guesses[number] for size, number in zip(sizes, shown, strict=True))
    evidence = Evidence(
        served.name,
        sum(sizes),
        means[served],
        guess / sum(sizes),
        {other.name: means[other] for other in others},
    )
    if not counted:
        return evidence
    better, alike = [], []
    for other in others:
        gains = [losses[served][number] - losses[other][number] for number in counted]
        low, high = _interval(gains, RISK / len(others))
        if low > LEAST:
            better.append(other)
        elif high > -LEAST:
            alike.append(other.name)
    best = min(better, key=means.__getitem__, default=None)
    warning = None if best is None else _warning(best, means[best], means[served])
    return replace(evidence, warning=warning, alike=alike, is_told=True)


def _interval(differences: Sequence["Tensor"], risk: float) -> tuple[float, float]:
    """A lower and an upper bound of the mean difference; each fails with this risk.

    Args:
        differences: for each text the differences ``[tokens]``, in order.
        risk: the probability that the mean is beyond one of the bounds.
    """
    import torch

    chunks = torch.cat([one[: len(one) // CHUNK * CHUNK].view(-1, CHUNK) for one in differences])
    sample = chunks.mean(1)
    reach = (
        student_quantile(len(sample) - 1, 1 - 2 * risk) * sample.std().item() / sqrt(len(sample))
    )
    return sample.mean().item() - reach, sample.mean().item() + reach


def _warning(best: Reading, loss: float, served_loss: float) -> str:
    return (
        f"with {best.name} the loss is {loss:.2f}, with config.json's {best.stated} it is "
        f"{served_loss:.2f}: {best.question}"
    )
