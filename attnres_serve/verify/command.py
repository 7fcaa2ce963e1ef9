"""``attnres-serve verify``: is a checkpoint served as it was trained?"""

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from attnres_serve import output, settings
from attnres_serve.checkpoints import needs
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.finite import check_folder_is_finite
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.model import backend as backend_choice
from attnres_serve.verify import compare, passages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder of the checkpoint")
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
        help=f"tokens of each passage (default: {passages.USUAL}, or "
        f"{passages.BEYOND} more than the model's window of up to {passages.WIDEST} has)",
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
    limits = passages.limits(served, wanted)
    tokens = passages.tokens(served, limits, own.tokens, str(folder))
    prompts = passages.passages(folder, own.text, tokens, own.passages)
    report = compare.verify(folder, reference, prompts, settings.given(own))
    unreached = passages.unreached(limits, tokens)
    if own.json:
        print(json.dumps(asdict(report) | {"unreached": unreached}), file=output.out())
    else:
        print(table(report, unreached), file=output.out())
    return 0 if report.holds else 1


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


def table(report: compare.Report, unreached: str | None = None) -> str:
    """The report for a reader; ``unreached`` says what attention did not come to do."""
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
    lines.append(
        "it is served as it was trained (eager, float32, one process)"
        if report.holds
        else "IT DOES NOT HOLD"
    )
    return "\n".join(lines)


def _wrapped(name: str, text: str) -> list[str]:
    """A named text in lines of 80 columns, below each other."""
    return textwrap.wrap(text, 80, initial_indent=f"{name:20}", subsequent_indent=" " * 20)
