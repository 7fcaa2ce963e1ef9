"""``attnres-serve verify``: a check that a checkpoint is served as its config.json describes."""

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve import output, settings
from attnres_serve.checkpoints import needs, tokenizer
from attnres_serve.checkpoints.checked import Checkpoint, check_folder
from attnres_serve.checkpoints.finite import check_folder_is_finite
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.model import backend as backend_choice
from attnres_serve.verify import compare, evidence, passages, readings, texts

if TYPE_CHECKING:
    from attnres_serve.verify.oracle.edits import Edit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument(
        "--reference",
        metavar="CHECKPOINT",
        help="compare with this checkpoint, for example the one it was converted from (default: "
        "itself)",
    )
    what = "compare with the float64 model under an edit of what its sites read, as CHECKPOINT has"
    settings.add_edits(parser, "edit", what)
    parser.add_argument("--text", metavar="FILE", help="text to run over (default: one of ours)")
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"tokens of each passage (default: {passages.USUAL}, or "
        f"{passages.BEYOND} more than the model's window of up to {passages.WIDEST} has)",
    )
    parser.add_argument(
        "--passages", type=int, default=2, help="passages of the text (default: %(default)s)"
    )
    parser.add_argument(
        "--readings",
        type=int,
        metavar="TOKENS",
        help="tokens of each text under other readings of config.json, 0 for none (default: "
        f"{texts.USUAL}, fewer above {texts.SMALL // 10**6} million parameters, at least "
        f"{texts.FEW})",
    )
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Verify a checkpoint and print the report.

    Returns:
        0 if all bounds hold, 1 if not.

    Raises:
        CheckpointError, SettingError: nothing could be compared; the message is one sentence.
    """
    if (options.tokens is not None and options.tokens < 2) or options.passages < 1:
        raise SettingError(
            f"--tokens is {options.tokens} and --passages {options.passages}; expected at least 2 "
            "and 1."
        )
    if options.readings and options.readings < evidence.FEWEST:
        raise SettingError(
            f"--readings is {options.readings}; expected at least {evidence.FEWEST} tokens of a "
            "text, or 0 to measure no other reading."
        )
    folder, reference = Path(options.checkpoint), Path(options.reference or options.checkpoint)
    checkpoint = check_folder(folder)
    served = parsed = checkpoint.translated(str(folder))
    needs.check_heads(str(folder), served)
    backend_choice.require(options.attnres_backend)
    if reference != folder:
        checkpoint = check_folder(reference)
        parsed = checkpoint.translated(str(reference))
        _require_same_sizes(folder, served, reference, parsed)
    for path in dict.fromkeys((folder, reference)):
        check_folder_is_finite(path)
    additional_config = settings.from_flags(vars(options))
    settings.require_edits(additional_config, served.spec)
    edits = edits_by_site(options.edit, parsed)
    limits = passages.limits(served, parsed)
    tokens = passages.tokens(served, limits, options.tokens, str(folder))
    prompts = passages.passages(folder, options.text, tokens, options.passages)
    output.say("load the model in float64")
    model = compare.reference(reference, parsed)
    edited = model.with_spec(replace(model.spec, edits=edits)) if edits else model
    report = compare.verify(folder, edited, prompts, additional_config)
    unreached = passages.unreached(limits, tokens)
    measured = (
        None if parsed.spec is None else _evidence(checkpoint, parsed, folder, model, options)
    )
    if options.json:
        more = {"unreached": unreached, "readings": None if measured is None else asdict(measured)}
        print(json.dumps(asdict(report) | more), file=output.out())
    else:
        print(table(report, unreached, measured), file=output.out())
    return 0 if report.holds else 1


def edits_by_site(texts: Sequence[str], parsed: ParsedConfig) -> dict[int, list["Edit"]]:
    """The edits of the float64 model from the values of ``--edit``, by site."""
    if not texts:
        return {}
    from attnres_serve.depth import edit_text, static_edits  # they import pydantic
    from attnres_serve.verify.oracle.edits import Edit

    edits: dict[int, list[Edit]] = {}
    for _, site, one, sources in static_edits.of_sites(edit_text.each(texts), parsed.spec):
        edits.setdefault(site.index, []).append(Edit(one.kind, sources, one.values))
    return edits


def _evidence(
    checkpoint: Checkpoint,
    parsed: ParsedConfig,
    served: Path,
    model: compare.Reference,
    options: argparse.Namespace,
) -> evidence.Evidence | None:
    """The losses under all readings of a config.json; None if no text is long enough.

    The tokenizer is that of the served checkpoint, which was compared with its vocabulary.
    """
    tokens = options.readings
    if tokens is None:
        tokens = texts.usual(sum(tensor.numel() for tensor in model.weights.values()))
    most = min(tokens, passages.context(parsed))
    if not most:
        return None
    content = None if options.text is None else passages.read(options.text)
    pieces = texts.pieces(content, most, evidence.FEWEST, tokenizer.load(served))
    if not pieces:
        return None
    every = readings.readings(checkpoint)
    steps = len(every) * len(pieces)
    with output.bar(total=steps, desc="reading config.json otherwise", unit="step") as progress:
        return evidence.measure(model, every, pieces, progress.update)


def _require_same_sizes(
    folder: Path, served: ParsedConfig, reference: Path, parsed: ParsedConfig
) -> None:
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value, other = served.config[key], parsed.config[key]
        if value != other:
            raise CheckpointError(
                f"{key} is {value} in {folder} and {other} in {reference}, which is another model; "
                "give the checkpoint that it was converted from as --reference."
            )


def table(
    report: compare.Report,
    unreached: str | None = None,
    measured: evidence.Evidence | None = None,
) -> str:
    """The report as text.

    Args:
        report: the comparison.
        unreached: the limits of attention that the passages do not exceed.
        measured: the losses under other readings of config.json.
    """
    agreement = "no choice was clear"
    if report.greedy_agreement is not None:
        agreement = f"{report.greedy_agreement:.1%}"
    lines = [
        f"tokens compared     {report.tokens}",
        f"largest logprob gap {report.logprob_gap:.2e}   (bound {compare.LOGPROB_BOUND:.0e})",
        f"mean KL divergence  {report.kl:.2e} nats",
        f"largest of a token  {report.kl_max:.2e} nats   (bound {compare.KL_BOUND:.0e})",
        f"greedy agreement    {agreement}",
        f"worst part          {report.worst_part}",
        f"its relative error  {report.worst_error:.2e}   (bound {compare.PART_BOUND:.0e})",
    ]
    others = [part for part in report.parts if part != report.worst_part]
    if others:
        lines += _wrapped("also beyond it", ", ".join(others))
    if unreached:
        lines += _wrapped("not all of it", unreached)
    if measured:
        lines += _readings(measured)
    lines.append(
        "it is served as config.json describes (eager, float32, one process)"
        if report.holds
        else "IT DOES NOT HOLD"
    )
    return "\n".join(lines)


def _readings(measured: evidence.Evidence) -> list[str]:
    """The losses under the readings of config.json, in lines."""
    losses = ", ".join(f"{loss:.2f} with {name}" for name, loss in measured.others.items())
    lines = [
        f"loss of texts       {measured.loss:.2f} nats a token, of {measured.tokens} tokens",
        *_wrapped("read otherwise", losses or "nothing else fits the tensors"),
    ]
    if not measured.others:
        return lines
    if not measured.is_told:
        conclusion = (
            "cannot tell whether config.json is right: under no reading are the texts predicted "
            f"better than by how often their tokens occur ({measured.guess:.2f}). Either the "
            "weights are untrained, or --text should name a text of the kind that they were "
            "trained on."
        )
    elif measured.warning:
        return [*lines, *_wrapped("WARNING", measured.warning)]
    elif measured.alike:
        conclusion = f"cannot tell config.json's from {' and '.join(measured.alike)} by these texts"
    else:
        conclusion = "every other is worse by more than the texts' noise"
    return [*lines, *_wrapped("which is right", conclusion)]


def _wrapped(name: str, text: str) -> list[str]:
    """A text with a name, wrapped to 80 columns."""
    return textwrap.wrap(text, 80, initial_indent=f"{name:20}", subsequent_indent=" " * 20)
