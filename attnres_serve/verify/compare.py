"""The comparison of a checkpoint as served with its float64 model.

The checkpoint is served in float32 by an engine in this process, and evaluated in float64 by a
model that shares no code with the engine (``oracle``).  They are compared in two ways:

* as wholes: logprobs, KL divergence and greedy choice at every token of a text;
* part by part: every site, sublayer and the head of the float64 model is given what the engine's
  part was given, so that a fault shows where it is and is not hidden by what follows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attnres_serve import output
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.files import read_config
from attnres_serve.depth.layout import Layout
from attnres_serve.errors import CheckpointError, first_line
from attnres_serve.families import FAMILIES
from attnres_serve.verify import evidence

if TYPE_CHECKING:
    from torch import Tensor

    from attnres_serve.verify import oracle


# A part in float32 against float64: sums of some thousand products lose about 1e-6.
PART_BOUND = 1e-4

# The whole: roundings add up over the layers; these are a tenth of what bfloat16 costs and less.
LOGPROB_BOUND = 1e-3

KL_BOUND = 1e-5

TIE = 2e-3  # a greedy choice whose lead is smaller is no choice


@dataclass(frozen=True)
class Passage:
    """What the engine did with one prompt of ``T`` tokens.

    Attributes:
        ids: the prompt.
        layout: the decoder's sublayers.
        received: per site ``[T, d]``: the token embedding, then the output of each sublayer.
        normed: per site ``[T, d]``: what the site gave to its sublayer or, the last, to the head.
        logits: ``[T, vocabulary]``.
    """

    ids: list[int]
    layout: Layout
    received: list["Tensor"]
    normed: list["Tensor"]
    logits: "Tensor"


@dataclass(frozen=True)
class Report:
    """The worst of all tokens, and what it means.

    Attributes:
        tokens: how many were compared.
        logprob_gap: largest difference of the logprob of a token of the text.
        kl: mean KL divergence of the engine's distribution from the reference, in nats.
        kl_max: largest one. The bound is on it, as a mean over many tokens would hide one.
        greedy_agreement: share of the tokens with a clear choice at which both choose the same;
            None if no choice was clear.
        worst_part: the part with the largest relative error.
        worst_error: that error, the norm of the difference over the norm of the expected row.
        parts: relative error by part, for those beyond the bound.
        holds: whether everything is within its bound.
    """

    tokens: int
    logprob_gap: float
    kl: float
    kl_max: float
    greedy_agreement: float | None
    worst_part: str
    worst_error: float
    parts: dict[str, float]
    holds: bool


def verify(
    folder: Path,
    model: "Reference",
    prompts: Sequence[list[int]],
    chosen: dict[str, str],
) -> Report:
    """Serve ``folder`` and compare it with a model in float64.

    Args:
        folder: checkpoint folder of any served format.
        model: that of ``reference``.
        prompts: token ids.
        chosen: our settings, by their keys in ``additional_config``.
    """
    import torch

    progress = output.bar(total=1 + 2 * len(prompts), desc="starting the engine", unit="step")
    with torch.inference_mode(), progress:

        def step(what: str) -> None:
            progress.update()
            progress.set_description(what)

        found = []
        for passage in serve(folder, prompts, chosen):
            found.append(passage)
            step("serving")
        step("comparing")
        wholes: list[dict[str, Tensor]] = []
        errors: dict[str, float] = {}
        for passage in found:
            wholes.append(whole(passage, model.logprobs(passage.ids)))
            for part, error in part_errors(model, passage):
                errors[part] = max(errors.get(part, 0.0), error, key=_severity)
            step("comparing")
    return _report(wholes, errors)


def serve(
    folder: Path, prompts: Sequence[list[int]], chosen: dict[str, str], dtype: str = "float32"
) -> Iterator[Passage]:
    """Run prompts through an engine in this process and keep what every site received and gave."""
    from attnres_serve.compat import engines

    with engines.recorded_engine(str(folder), max(map(len, prompts)), chosen, dtype) as engine:
        layout, record = engine
        for ids in prompts:
            yield Passage(ids, layout, *record(ids))


class Reference(evidence.Model, Protocol):
    """A model in float64: see ``oracle.Model`` and ``rewritten.Rewritten``."""

    weights: "dict[str, Tensor]"

    def with_spec(self, spec: "oracle.Spec") -> "Reference": ...

    def normed(self, site: int, x: "Tensor", y: Sequence["Tensor"]) -> "Tensor": ...

    def given(
        self, ids: Sequence[int], normed: Sequence["Tensor"]
    ) -> tuple["Tensor", list["Tensor"], "Tensor"]: ...


def reference(folder: Path) -> Reference:
    """The model of a checkpoint.

    Raises:
        CheckpointError: it has none; the sentence says why.
    """
    if read_config(folder).get("quantization_config"):
        raise CheckpointError(
            f"{folder} is quantised, and quantised weights are not supported by verify; verify the "
            "checkpoint that it was quantised from."
        )
    import torch

    try:
        with torch.inference_mode():
            return _model(folder)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} cannot be evaluated in float64 ({first_line(error)}): verify's model does "
            "not know all of it, so there is nothing to compare with."
        ) from error


def _model(folder: Path) -> Reference:
    """The hand-written model, or where it does not know the family, Hugging Face's rewritten."""
    from attnres_serve.verify import oracle, rewritten

    parsed = check_folder(folder).translated(str(folder))
    if parsed.base in oracle.BASES:
        return oracle.load(folder)
    layout = parsed.layout
    sites = [rewritten.Site(one.layer, one.kind, one.norm) for one in layout.sublayers]
    return rewritten.load(folder, sites, layout.final_norm, FAMILIES[parsed.base].hf)


def part_errors(model: Reference, passage: Passage) -> Iterator[tuple[str, float]]:
    """Relative error of every part of the engine, given what that part was given.

    A site is given the outputs of all sublayers before it, so it is wrong if its query, key norm,
    norm or choice of sources is.
    """
    received = [tensor.double() for tensor in passage.received]
    normed = [tensor.double() for tensor in passage.normed]
    embedding, outputs = received[0], received[1:]
    layout = passage.layout
    expected_embedding, expected_outputs, expected_logits = model.given(passage.ids, normed)
    yield "the embedding", _error(embedding, expected_embedding)
    for site, found in enumerate(normed):
        name = layout.site_name(site)
        yield f"the site of {name}", _error(found, model.normed(site, embedding, outputs[:site]))
        if site < layout.num_sublayers:
            yield name, _error(outputs[site], expected_outputs[site])
    yield "the head", _error(passage.logits.double(), expected_logits)


def _error(found: "Tensor", expected: "Tensor") -> float:
    norms = expected.norm(dim=-1)
    return ((found - expected).norm(dim=-1) / norms.clamp(min=1e-30)).max().item()


def whole(passage: Passage, expected: "Tensor") -> dict[str, "Tensor"]:
    """Per token the logprob gap (of the next token), the KL divergence, and the greedy choices."""
    import torch

    found = passage.logits.double().log_softmax(-1)
    nexts = torch.tensor(passage.ids[1:])[:, None]
    best = expected.topk(2, dim=-1).values
    return {
        "gap": (found - expected)[:-1].gather(1, nexts).abs().flatten(),
        "kl": (expected.exp() * (expected - found)).sum(-1),
        "same": found.argmax(-1) == expected.argmax(-1),
        "clear": best[:, 0] - best[:, 1] >= TIE,
    }


def _severity(error: float) -> tuple[bool, float]:
    """What errors are ordered by: NaN is worse than any number."""
    return isnan(error), error


def _report(wholes: list[dict[str, "Tensor"]], errors: dict[str, float]) -> Report:
    import torch

    every = {key: torch.cat([one[key] for one in wholes]) for key in wholes[0]}
    clear = every["same"][every["clear"]]
    agreement = clear.double().mean().item() if len(clear) else None
    worst = max(errors, key=lambda part: _severity(errors[part]))
    beyond = {part: error for part, error in errors.items() if not error <= PART_BOUND}
    gap, kl, kl_max = (
        every["gap"].max().item(),
        every["kl"].mean().item(),
        every["kl"].max().item(),
    )
    is_near = gap <= LOGPROB_BOUND and kl_max <= KL_BOUND
    holds = not beyond and is_near and agreement in (1, None)
    shown = agreement, worst, errors[worst], beyond, holds
    return Report(len(every["kl"]), gap, kl, kl_max, *shown)
