"""``attnres-serve verify``: is a checkpoint served as config.json describes?"""

import argparse
import json
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres_serve import output, settings
from attnres_serve.checkpoints import needs, tokenizer
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.finite import check_folder_is_finite
from attnres_serve.depth.sites import sites
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
    parser.add_argument(
        "--edit",
        action="append",
        default=[],
        metavar="EDIT",
        help="compare with the float64 model under an edit of what its sites read, as CHECKPOINT "
        "was converted or is served by --attnres-edit; may be given several times",
    )
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
    if own.readings and own.readings < evidence.FEWEST:
        raise SettingError(
            f"--readings is {own.readings}; expected at least {evidence.FEWEST} tokens of a text, "
            "or 0 to measure no other reading."
        )
    folder, reference = Path(own.checkpoint), Path(own.reference or own.checkpoint)
    served = check_folder(folder).translated(str(folder))
    needs.check_heads(str(folder), served)
    backend_choice.require(own.attnres_backend)
    wanted = served
    if reference != folder:
        wanted = check_folder(reference).translated(str(reference))
        _require_same_sizes(folder, served, reference, wanted)
    for checkpoint in dict.fromkeys((folder, reference)):
        check_folder_is_finite(checkpoint)
    settings.require_edits(settings.given(vars(own)), served.spec)
    edits = edits_by_site(settings.given({settings.EDIT: own.edit}), wanted)
    limits = passages.limits(served, wanted)
    tokens = passages.tokens(served, limits, own.tokens, str(folder))
    prompts = passages.passages(folder, own.text, tokens, own.passages)
    output.say("load the model in float64")
    model = compare.reference(reference)
    edited = model.with_spec(replace(model.spec, edits=edits)) if edits else model
    report = compare.verify(folder, edited, prompts, settings.given(vars(own)))
    unreached = passages.unreached(limits, tokens)
    found = None if wanted.spec is None else _evidence(reference, folder, model, own)
    if own.json:
        told = {"unreached": unreached, "readings": None if found is None else asdict(found)}
        print(json.dumps(asdict(report) | told), file=output.out())
    else:
        print(table(report, unreached, found), file=output.out())
    return 0 if report.holds else 1


def edits_by_site(asked: dict[str, Any], wanted: ParsedConfig) -> dict[int, list["Edit"]]:
    """The edits of the float64 model, by sites."""
    settings.require_edits(asked, wanted.spec)
    from attnres_serve.depth.edits import resolve  # imports pydantic
    from attnres_serve.verify.oracle.edits import Edit

    found: dict[int, list[Edit]] = {}
    for one in resolve(settings.edits(asked), sites(wanted.spec), 1) if wanted.spec else ():
        for site, sources in one.sites:
            found.setdefault(site, []).append(Edit(one.kind, sources, one.values))
    return found


def _evidence(
    reference: Path, served: Path, model: compare.Reference, own: argparse.Namespace
) -> evidence.Evidence | None:
    """What texts say of the readings of a checkpoint's config.json; None if none is long enough.

    The tokenizer is that of the served one, which was compared with its vocabulary.
    """
    checkpoint = check_folder(reference)
    asked = own.readings
    if asked is None:
        asked = texts.usual(sum(tensor.numel() for tensor in model.weights.values()))
    most = min(asked, passages.context(checkpoint.translated(str(reference))))
    if not most:
        return None
    content = None if own.text is None else passages.read(own.text)
    found = texts.pieces(content, most, evidence.FEWEST, tokenizer.load(served))
    if not found:
        return None
    every = readings.readings(checkpoint)
    steps = len(every) * len(found)
    with output.bar(total=steps, desc="reading config.json otherwise", unit="step") as progress:
        return evidence.measure(model, every, found, progress.update)


def _require_same_sizes(
    folder: Path, served: ParsedConfig, reference: Path, wanted: ParsedConfig
) -> None:
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        found, other = served.config[key], wanted.config[key]
        if found != other:
            raise CheckpointError(
                f"{key} is {found} in {folder} and {other} in {reference}, which is another model; "
                "give the checkpoint that it was converted from as --reference."
            )


def table(
    report: compare.Report,
    unreached: str | None = None,
    found: evidence.Evidence | None = None,
) -> str:
    """The report for a reader.

    Args:
        report: the comparison.
        unreached: what attention did not come to do.
        found: what texts say of other readings of config.json.
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
    if found:
        lines += _readings(found)
    lines.append(
        "it is served as config.json describes (eager, float32, one process)"
        if report.holds
        else "IT DOES NOT HOLD"
    )
    return "\n".join(lines)


def _readings(found: evidence.Evidence) -> list[str]:
    """What texts say of config.json, in lines."""
    losses = ", ".join(f"{loss:.2f} with {name}" for name, loss in found.others.items())
    lines = [
        f"loss of texts       {found.loss:.2f} nats a token, of {found.tokens} tokens",
        *_wrapped("read otherwise", losses or "nothing else fits the tensors"),
    ]
    if not found.others:
        return lines
    if not found.is_told:
        said = (
            "cannot tell whether config.json is right: under no reading are the texts predicted "
            f"better than by how often their tokens occur ({found.guess:.2f}). Either the weights "
            "are untrained, or --text should name a text of the kind that they were trained on."
        )
    elif found.warning:
        return [*lines, *_wrapped("WARNING", found.warning)]
    elif found.alike:
        said = f"cannot tell config.json's from {' and '.join(found.alike)} by these texts"
    else:
        said = "every other is worse by more than the texts' noise"
    return [*lines, *_wrapped("which is right", said)]


def _wrapped(name: str, text: str) -> list[str]:
    """A named text in lines of 80 columns, below each other."""
    return textwrap.wrap(text, 80, initial_indent=f"{name:20}", subsequent_indent=" " * 20)
