"""``attnres-serve verify``: is a checkpoint served as it was trained?

The checkpoint is served in float32 by an engine in this process, and evaluated in float64 by a
model that shares no code with the engine (``oracle``).  They are compared in two ways:

* as wholes: logprobs, KL divergence and greedy choice at every token of a text;
* part by part: every site, sublayer and the head of the float64 model is given what the engine's
  part was given, so that a fault shows where it is and is not hidden by what follows.
"""

import argparse
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil, isnan
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve import own_class, reach, settings, tokenizer
from attnres_serve.checkpoint import examine
from attnres_serve.errors import CheckpointError, SettingError, first_line
from attnres_serve.folder import read_config
from attnres_serve.formats.translation import Translation

if TYPE_CHECKING:
    from torch import Tensor

    from attnres_serve.oracle import Model

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
        received: per site ``[T, d]``: the token embedding, then the output of each sublayer.
        normed: per site ``[T, d]``: what the site gave to its sublayer or, the last, to the head.
        logits: ``[T, vocabulary]``.
    """

    ids: list[int]
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
        kl_max: largest one.
        greedy_agreement: share of the tokens with a clear choice at which both choose the same.
        worst_part: the part with the largest relative error, None where parts were not compared.
        worst_error: that error, the norm of the difference over the norm of the expected row.
        parts: relative error by part, for those beyond the bound.
        holds: whether everything is within its bound.
    """

    tokens: int
    logprob_gap: float
    kl: float
    kl_max: float
    greedy_agreement: float
    worst_part: str | None
    worst_error: float
    parts: dict[str, float]
    holds: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument(
        "--against",
        choices=("fp64", "hf"),
        default="fp64",
        help="our float64 model, or the class of open-attnres or delta-attnres that wrote the "
        "checkpoint, its module being on PYTHONPATH (default: fp64)",
    )
    parser.add_argument(
        "--reference",
        metavar="CHECKPOINT",
        help="compare with this checkpoint, for example the one it was converted from (default: "
        "itself)",
    )
    parser.add_argument("--text", metavar="FILE", help="text to run over (default: one of ours)")
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"tokens of each passage (default: {reach.USUAL}, or {reach.BEYOND} more than the "
        f"model's window of up to {reach.WIDEST} has)",
    )
    parser.add_argument(
        "--passages", type=int, default=2, help="passages of the text (default: %(default)s)"
    )
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(own: argparse.Namespace) -> int:
    """Verify a checkpoint and print the report.

    Returns:
        0 if it holds, 1 if not.

    Raises:
        CheckpointError, SettingError: with one sentence, where nothing could be compared.
    """
    if (own.tokens is not None and own.tokens < 2) or own.passages < 1:
        raise SettingError(
            f"--tokens is {own.tokens} and --passages {own.passages}; expected at least 2 and 1."
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the report is what is to be read
    with _one_sentence():
        folder, reference = Path(own.checkpoint), Path(own.reference or own.checkpoint)
        served = examine(folder).translated(str(folder))
        if reference != folder:
            _require_same_sizes(folder, served, reference)
        tokens = reach.tokens(served, own.tokens, str(folder))
        prompts = passages(folder, own.text, tokens, own.passages)
        report = verify(folder, reference, prompts, settings.given(own), own.against)
    unreached = reach.unreached(served.config, tokens)
    if own.json:
        print(json.dumps(asdict(report) | {"unreached": unreached}))
    else:
        print(table(report, unreached))
    return 0 if report.holds else 1


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Let every failure end as a refusal: a stack trace's status, 1, is for what does not hold."""
    try:
        yield
    except (CheckpointError, SettingError, ModuleNotFoundError):
        raise
    except Exception as error:  # whatever vLLM, torch or the machine may come to
        if os.environ["VLLM_LOGGING_LEVEL"].upper() == "DEBUG":
            traceback.print_exc()
        raise SettingError(
            f"nothing was compared, because verify failed ({first_line(error)}); with "
            "VLLM_LOGGING_LEVEL=DEBUG it says where."
        ) from error


def _require_same_sizes(folder: Path, served: Translation, reference: Path) -> None:
    wanted = examine(reference).translated(str(reference))
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        found, other = served.config[key], wanted.config[key]
        if found != other:
            raise CheckpointError(
                f"{key} is {found} in {folder} and {other} in {reference}, which is another model; "
                "give the checkpoint that it was converted from as --reference."
            )


def verify(
    folder: Path,
    reference: Path,
    prompts: Sequence[list[int]],
    chosen: dict[str, str],
    against: str = "fp64",
) -> Report:
    """Serve ``folder`` and compare it with the model of ``reference``.

    Args:
        folder, reference: checkpoint folders of any served format.
        prompts: token ids.
        chosen: our settings, by their keys in ``additional_config``.
        against: ``fp64`` or ``hf``.
    """
    import torch
    from tqdm import tqdm

    with torch.inference_mode():
        evaluate, parts = _reference(reference, against)
    progress = tqdm(total=1 + 2 * len(prompts), desc="starting the engine", unit="step")
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
            wholes.append(whole(passage, evaluate(passage.ids)))
            for part, error in parts(passage):
                if not error <= errors.get(part, 0.0):  # NaN is worst
                    errors[part] = error
            step("comparing")
    return _report(wholes, errors)


def serve(
    folder: Path, prompts: Sequence[list[int]], chosen: dict[str, str], dtype: str = "float32"
) -> Iterator[Passage]:
    """Run prompts through an engine in this process and keep what every site received and gave."""
    from attnres_serve import compat

    with compat.recorded_engine(str(folder), max(map(len, prompts)), chosen, dtype) as record:
        for ids in prompts:
            yield Passage(ids, *record(ids))


def passages(folder: Path, text: str | None, tokens: int, count: int) -> list[list[int]]:
    """``count`` passages of a text, evenly spaced, in the checkpoint's tokens.

    Ours goes on from its beginning where it is too short.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
        SettingError: the text cannot be read or is too short.
    """
    from attnres_serve import oracle

    try:
        content = Path(text).read_text(encoding="utf-8") if text else str(oracle.__doc__)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the text {text} cannot be read ({error}).") from None
    ids = tokenizer.load(folder)(content)["input_ids"]
    if text is None:
        ids *= ceil(tokens / max(1, len(ids)))
    if len(ids) < tokens:
        raise SettingError(
            f"the text has {len(ids)} tokens; expected at least the {tokens} of a passage: give a "
            "longer one with --text or fewer --tokens."
        )
    step = (len(ids) - tokens) / max(1, count - 1)
    return [ids[round(i * step) : round(i * step) + tokens] for i in range(count)]


Evaluate = Callable[[list[int]], "Tensor"]
Parts = Callable[[Passage], Iterator[tuple[str, float]]]


def _reference(folder: Path, against: str) -> tuple[Evaluate, Parts]:
    """Log-probabilities ``[T, vocabulary]`` for token ids, and the comparison part by part."""
    if against == "hf":
        return own_class.load(folder), lambda passage: iter(())
    from attnres_serve import oracle

    if read_config(folder).get("quantization_config"):
        raise CheckpointError(
            f"{folder} is quantised, and quantised weights are not supported by verify; verify the "
            "checkpoint that it was quantised from."
        )
    try:
        model = oracle.load(folder)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} cannot be evaluated in float64 ({first_line(error)}): verify's model does "
            "not know all of it, so there is nothing to compare with."
        ) from error
    return model.logprobs, lambda passage: part_errors(model, passage)


def part_errors(model: "Model", passage: Passage) -> Iterator[tuple[str, float]]:
    """Relative error of every part of the engine, given what that part was given.

    A site is given the outputs of all sublayers before it, so it is wrong if its query, key norm,
    norm or choice of sources is.
    """
    from attnres_serve.schedule import site_name

    received = [tensor.double() for tensor in passage.received]
    normed = [tensor.double() for tensor in passage.normed]
    embedding, outputs = received[0], received[1:]
    layers = model.spec.layers
    yield "the embedding", _error(embedding, model.embed(passage.ids))
    for site, found in enumerate(normed):
        name = site_name(site, layers)
        yield f"the site of {name}", _error(found, model.normed(site, embedding, outputs[:site]))
        if site < len(outputs):
            sublayer = model.mlp if site % 2 else model.attention
            yield name, _error(outputs[site], sublayer(found, site // 2))
    yield "the head", _error(passage.logits.double(), model.logits(normed[-1]))


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


def _report(wholes: list[dict[str, "Tensor"]], errors: dict[str, float]) -> Report:
    import torch

    every = {key: torch.cat([one[key] for one in wholes]) for key in wholes[0]}
    clear = every["same"][every["clear"]]
    agreement = clear.double().mean().item() if len(clear) else 1.0
    worst = max(errors, key=lambda part: (isnan(errors[part]), errors[part]), default=None)
    beyond = {part: error for part, error in errors.items() if not error <= PART_BOUND}
    gap, kl, kl_max = (
        every["gap"].max().item(),
        every["kl"].mean().item(),
        every["kl"].max().item(),
    )
    holds = not beyond and gap <= LOGPROB_BOUND and kl <= KL_BOUND and agreement == 1
    worst_error = errors[worst] if worst else 0.0
    return Report(len(every["kl"]), gap, kl, kl_max, agreement, worst, worst_error, beyond, holds)


def table(report: Report, unreached: str | None = None) -> str:
    """The report for a reader; ``unreached`` says what attention did not come to do."""
    lines = [
        f"tokens compared     {report.tokens}",
        f"largest logprob gap {report.logprob_gap:.2e}   (bound {LOGPROB_BOUND:.0e})",
        f"KL divergence       {report.kl:.2e} nats on average, {report.kl_max:.2e} at most   "
        f"(bound of the average {KL_BOUND:.0e})",
        f"greedy agreement    {report.greedy_agreement:.1%}",
    ]
    if report.worst_part:
        lines.append(
            f"worst part          {report.worst_part}, relative error {report.worst_error:.2e}   "
            f"(bound {PART_BOUND:.0e})"
        )
        others = [part for part in report.parts if part != report.worst_part]
        if others:
            lines.append(f"also beyond it      {', '.join(others)}")
    if unreached:
        lines.append(f"not all of it       {unreached}")
    lines.append(
        "it is served as it was trained (eager, float32, one process)"
        if report.holds
        else "IT DOES NOT HOLD"
    )
    return "\n".join(lines)
