"""The comparison of a served checkpoint with its float64 model.

The checkpoint is served in float32 by an engine in this process, and evaluated in float64 by a
model that shares no code with the engine (``oracle``).  They are compared in two ways:

* as wholes: logprobs, KL divergence and greedy choice at every token of a text;
* part by part: every site, every sublayer and the head of the float64 model gets the input of the
  engine's part, so that a fault is located and not hidden by later parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attnres_serve import output
from attnres_serve.checkpoints.files import read_config
from attnres_serve.depth.layout import Layout
from attnres_serve.errors import CheckpointError, first_line
from attnres_serve.families import FAMILIES
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.verify import evidence

if TYPE_CHECKING:
    from torch import Tensor

    from attnres_serve.verify import oracle


# Of a part in float32 from float64: sums of some thousand products lose about 1e-6.
PART_BOUND = 1e-4

# Of the whole: roundings add up over the layers; these are at most a tenth of bfloat16's errors.
LOGPROB_BOUND = 1e-3

KL_BOUND = 1e-5

TIE = 2e-3  # a greedy choice with a smaller lead is not compared


@dataclass(frozen=True)
class Passage:
    """The engine's tensors for one prompt of ``T`` tokens.

    Attributes:
        ids: the prompt.
        layout: the decoder's sublayers.
        received: per site ``[T, d]``: the token embedding, then the output of each sublayer.
        normed: per site ``[T, d]``: the input of its sublayer or, for the last site, of the head.
        logits: ``[T, vocabulary]``.
    """

    ids: list[int]
    layout: Layout
    received: list["Tensor"]
    normed: list["Tensor"]
    logits: "Tensor"


@dataclass(frozen=True)
class Report:
    """The worst of all tokens, and the verdict.

    Attributes:
        tokens: number of compared tokens.
        logprob_gap: largest difference of the logprob of a token of the text.
        kl: mean KL divergence of the engine's distribution from the reference, in nats.
        kl_max: largest KL divergence, which has the bound: a mean over many tokens would hide it.
        greedy_agreement: share of equal choices at the tokens with a clear choice; None if no
            choice was clear.
        worst_part: the part with the largest relative error.
        worst_error: that error, the norm of the difference over the norm of the expected row.
        parts: relative error by part, for parts beyond the bound.
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
        model: the result of ``reference``.
        prompts: token ids.
        chosen: settings, by their keys in ``additional_config``.
    """
    import torch

    progress = output.bar(total=1 + 2 * len(prompts), desc="starting the engine", unit="step")
    with torch.inference_mode(), progress:

        def step(what: str) -> None:
            progress.update()
            progress.set_description(what)

        served = []
        for passage in serve(folder, prompts, chosen):
            served.append(passage)
            step("serving")
        step("comparing")
        wholes: list[dict[str, Tensor]] = []
        errors: dict[str, float] = {}
        for passage in served:
            wholes.append(whole(passage, model.logprobs(passage.ids)))
            for part, error in part_errors(model, passage):
                errors[part] = max(errors.get(part, 0.0), error, key=_severity)
            step("comparing")
    return _report(wholes, errors)


def serve(
    folder: Path, prompts: Sequence[list[int]], chosen: dict[str, str], dtype: str = "float32"
) -> Iterator[Passage]:
    """Run prompts through an engine in this process, and record the inputs and outputs of sites."""
    from attnres_serve.compat import engines

    with engines.recorded_engine(str(folder), max(map(len, prompts)), chosen, dtype) as engine:
        layout, record = engine
        for ids in prompts:
            yield Passage(ids, layout, *record(ids))


class Reference(evidence.Model, Protocol):
    """A float64 model: see ``oracle.Model`` and ``rewritten.Rewritten``."""

    weights: "dict[str, Tensor]"

    def with_spec(self, spec: "oracle.Spec") -> "Reference": ...

    def normed(self, site: int, x: "Tensor", y: Sequence["Tensor"]) -> "Tensor": ...

    def from_normed(
        self, ids: Sequence[int], normed: Sequence["Tensor"]
    ) -> tuple["Tensor", list["Tensor"], "Tensor"]: ...


def reference(folder: Path, parsed: ParsedConfig) -> Reference:
    """The float64 model of a checkpoint.

    Args:
        folder: the checkpoint, which was checked.
        parsed: its parsed config.json.

    Raises:
        CheckpointError: there is none for this checkpoint.
    """
    if read_config(folder).get("quantization_config"):
        raise CheckpointError(
            f"{folder} is quantised, and quantised weights are not supported by verify; verify the "
            "checkpoint that it was quantised from."
        )
    import torch

    try:
        with torch.inference_mode():
            return _model(folder, parsed)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} cannot be evaluated in float64 ({first_line(error)}): verify's model does "
            "not know all of it, so there is nothing to compare with."
        ) from error


def _model(folder: Path, parsed: ParsedConfig) -> Reference:
    """The hand-written model or, for other families, Hugging Face's with rewritten residuals."""
    from attnres_serve.verify import oracle, rewritten

    if parsed.family in oracle.BASES:
        return oracle.load(folder)
    layout = parsed.layout
    sites = [rewritten.Site(one.layer, one.kind, one.norm) for one in layout.sublayers]
    return rewritten.load(folder, sites, layout.final_norm, FAMILIES[parsed.family].hf)


def part_errors(model: Reference, passage: Passage) -> Iterator[tuple[str, float]]:
    """The relative error of every part of the engine, for the same input.

    The input of a site is the outputs of all sublayers before it, so a site is wrong if its query,
    key norm, norm or choice of sources is.
    """
    received = [tensor.double() for tensor in passage.received]
    normed = [tensor.double() for tensor in passage.normed]
    embedding, outputs = received[0], received[1:]
    layout = passage.layout
    expected_embedding, expected_outputs, expected_logits = model.from_normed(passage.ids, normed)
    yield "the embedding", _error(embedding, expected_embedding)
    for site, output_of_site in enumerate(normed):
        name = layout.site_name(site)
        yield (
            f"the site of {name}",
            _error(output_of_site, model.normed(site, embedding, outputs[:site])),
        )
        if site < layout.num_sublayers:
            yield name, _error(outputs[site], expected_outputs[site])
    yield "the head", _error(passage.logits.double(), expected_logits)


def _error(actual: "Tensor", expected: "Tensor") -> float:
    norms = expected.norm(dim=-1)
    return ((actual - expected).norm(dim=-1) / norms.clamp(min=1e-30)).max().item()


def whole(passage: Passage, expected: "Tensor") -> dict[str, "Tensor"]:
    """For each token the logprob gap of the next token, the KL divergence, and greedy choices."""
    import torch

    logprobs = passage.logits.double().log_softmax(-1)
    nexts = torch.tensor(passage.ids[1:])[:, None]
    best = expected.topk(2, dim=-1).values
    return {
        "gap": (logprobs - expected)[:-1].gather(1, nexts).abs().flatten(),
        "kl": (expected.exp() * (expected - logprobs)).sum(-1),
        "same": logprobs.argmax(-1) == expected.argmax(-1),
        "clear": best[:, 0] - best[:, 1] >= TIE,
    }


def _severity(error: float) -> tuple[bool, float]:
    """The key for sorting errors: NaN is worse than any number."""
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
