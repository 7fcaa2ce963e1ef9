"""``attnres-serve bench``: the latency of a checkpoint against its standard-residual twin."""

import argparse
import json
import tempfile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres_serve import output, settings
from attnres_serve.bench import server
from attnres_serve.bench.workload import STARTS, STEPS
from attnres_serve.checkpoints import checked, hub, needs
from attnres_serve.compat import compiler
from attnres_serve.compat import source as vllm_source
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.flags import names, require_known, usual, value_of
from attnres_serve.model import backend as backend_choice

if TYPE_CHECKING:
    from attnres_serve.checkpoints.convert.source import Source

ATTNRES, BASELINE, CONTROL = "attnres", "baseline", "control"
MINUTES, QUICK_STEPS = 10.0, 16
REFUSED = {
    "--additional-config": "would be ours in one engine only; give --attnres-algorithm and "
    "--attnres-backend.",
    **dict.fromkeys(
        ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
        "makes a step give several tokens, and steps are what is timed here; measure a server "
        "with drafts and one without by --http.",
    ),
    "--revision": "is not looked up here; give the folder of that snapshot as CHECKPOINT.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline",
        default="auto",
        metavar="auto|PATH",
        help="what to compare with: the base family's class with the same weights, or this "
        "checkpoint; in stock vLLM without our plugin (default: auto)",
    )
    parser.add_argument(
        "--prompt-lengths", type=int, nargs="+", metavar="T", help="of prefill (default: 128 512)"
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        metavar="B",
        default=[1, 8],
        help="of decode (default: 1 8)",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="T", help="tokens before decode (default: 128)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help=f"decode steps (default: {STEPS})")
    parser.add_argument(
        "--starts",
        type=int,
        metavar="N",
        help=f"of every engine, each in a new process (default: {STARTS}; with --quick: 1)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="end before a start that would overrun it; the first start is always finished "
        f"(default: {MINUTES:.0f}; with --starts: none)",
    )
    parser.add_argument(
        "--control", action="store_true", help="a second baseline, whose ratio should be 1"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one start, fewer steps: a trial, no evidence"
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="keep compiled code there (default: compile anew)"
    )
    parser.add_argument("--out", metavar="FILE", help="also write the JSON document there")
    parser.add_argument("--json", action="store_true", help="print the JSON document alone")
    parser.add_argument(
        "--http", metavar="URL", help="measure the server at URL instead; no baseline"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="with --http: the model's name there (default: its first)"
    )
    settings.add_arguments(parser)


def run(
    checkpoint: str | None, own: argparse.Namespace, flags: list[str], command: list[str]
) -> int:
    """Measure what the command line asks for.

    On a terminal a report is printed.  Elsewhere the last line on stdout is one JSON document,
    which ``--json`` prints alone.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        own: what ``add_arguments`` defines.
        flags: any other, which are vLLM's engine's.
        command: the whole command line.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError(
            "bench needs a checkpoint as its first argument, the flags behind it: attnres-serve "
            "bench CHECKPOINT ..."
        )
    if not own.http:
        own_flags = names(add_arguments)
        require_known(flags, vllm_source.flags_of_engine(), own_flags, vllm_source.choices)
    flags = [usual(word) for word in flags]
    for name in ("steps", "starts"):
        value = getattr(own, name)
        if value is not None and value < 1:
            raise SettingError(f"--{name} is {value}; expected at least 1.")
    if own.budget is not None and not 0 < own.budget < inf:
        raise SettingError(f"--budget is {own.budget:g}; expected a number of minutes above 0.")
    if own.out and not Path(own.out).parent.is_dir():
        raise SettingError(f"--out: {Path(own.out).parent} is not a folder; make it first.")
    if own.http:
        _refuse_with_http(own)
        served = server.check_there(own.http, own.model, flags)
        from attnres_serve.bench import http

        document = http.measure(checkpoint, own, flags, served, command)
        shown = http.render(document)
    else:
        _refuse_without_http(own, flags)
        folder = hub.on_this_machine(checkpoint)
        found = _check(checkpoint, folder, own, flags)
        from attnres_serve.bench import report
        from attnres_serve.checkpoints.convert.source import Source

        source = Source(folder, found.config, found.translated(checkpoint), found.headers)
        document = measure(source, own, flags, command)
        shown = report.fitted(report.render(document))
    if not own.json:
        print(shown, file=output.out())
    if own.json or not output.out().isatty():
        print(json.dumps(document), file=output.out())
    if own.out:
        try:
            Path(own.out).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise SettingError(f"{own.out} cannot be written ({error}).") from None
    return 0


def _refuse_with_http(own: argparse.Namespace) -> None:
    """Refuse what only engines of our own could do."""
    given = vars(own)
    ours = ("quick", "starts", "budget", "control", "cache")
    found = [name for name in (*ours, *settings.CHOICES) if given[name]]
    found += ["baseline"] * (own.baseline != "auto")
    if found:
        raise SettingError(
            f"--{found[0].replace('_', '-')} does not go with --http, which measures a server as "
            "it is."
        )


def _refuse_without_http(own: argparse.Namespace, flags: list[str]) -> None:
    """Refuse what would be dropped, or would make the engines different."""
    if own.model:
        raise SettingError("--model goes with --http; here the checkpoint is what is measured.")
    given = {word.partition("=")[0].partition(".")[0] for word in flags}
    for flag, why in REFUSED.items():
        if flag in given:
            raise SettingError(f"{flag} {why}")
    if "--enforce-eager" in flags and vllm_source.is_cpu_build():
        raise SettingError(
            "--enforce-eager makes a norm of vLLM's many operators on CPU, while AttnRes with its "
            "norm is one, so that AttnRes would seem faster than no AttnRes; leave it out to "
            "measure compiled engines, as `serve` starts them."
        )
    longest = value_of("--max-model-len", flags)
    if longest is not None and not longest.isdigit():
        raise SettingError(f"--max-model-len is {longest}; expected a whole number of tokens.")


def _check(
    checkpoint: str, folder: Path, own: argparse.Namespace, flags: list[str]
) -> checked.Checkpoint:
    """Refuse what an engine would end at after the seconds of its start; torch is not imported."""
    backend_choice.require(own.attnres_backend)
    found = checked.check_model(str(folder), has_weights=_has_weights(flags))
    parsed = found.translated(checkpoint)
    needs.check_heads(checkpoint, parsed)
    needs.check_context(checkpoint, parsed, flags)
    compiler.require(flags)
    return found


def _has_weights(flags: list[str]) -> bool:
    return value_of("--load-format", flags) != "dummy"


def measure(
    source: "Source", own: argparse.Namespace, flags: list[str], command: list[str]
) -> dict[str, Any]:
    """The document of a measurement in engines on this machine.

    Args:
        source: the checkpoint; without weights it has no headers.
        own: what ``add_arguments`` defines.
        flags: of vLLM's engine.
        command: the whole command line.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    from attnres_serve.bench import baseline, document, machine, process, session, workload
    from attnres_serve.bench.measure import DISCARDED, PROCEDURE
    from attnres_serve.bench.ratios import overheads

    other = None if own.baseline == "auto" else baseline.read_other(own.baseline)
    parsed = source.parsed
    longest = value_of("--max-model-len", flags) or needs.context(parsed.config)
    steps = own.steps or (QUICK_STEPS if own.quick else STEPS)
    cells = workload.make_cells(int(longest), own.prompt_lengths, own.batches, own.contexts, steps)
    if value_of("--max-model-len", flags) is None:  # its KV cache need not fit
        flags = [*flags, f"--max-model-len={workload.room(cells)}"]
    if not vllm_source.is_cpu_build() and value_of("--gpu-memory-utilization", flags) is None:
        flags = [*flags, f"--gpu-memory-utilization={0.9 / (2 + own.control):.2f}"]  # all stay up
    starts = own.starts or (1 if own.quick else STARTS)
    rounds = workload.rounds_of(starts)
    minutes = own.budget or (inf if own.starts else MINUTES)
    threads = machine.cores()
    with tempfile.TemporaryDirectory() as scratch:
        twin = other.folder if other else Path(scratch) / "twin"
        if other is None:
            baseline.write_twin(source, twin)
        is_ours = other is None and baseline.is_ours(FAMILIES[parsed.base])
        plain = process.without_sites if is_ours else process.stock
        contenders = [
            plain(BASELINE, twin, flags),
            process.attnres(ATTNRES, source.folder, flags, settings.given(own)),
        ]
        if own.control:
            contenders.append(plain(CONTROL, twin, flags))
        found = session.run(contenders, cells, starts, rounds, threads, own.cache, 60 * minutes)
    facts = found.engines[ATTNRES]
    made = len(found.results)
    content = {
        "command": machine.command_line(["attnres-serve", *command]),
        "quick": own.quick,
        "versions": machine.versions(),
        "hardware": machine.hardware() | ({"gpu": facts["gpu"]} if facts["gpu"] else {}),
        "config": {
            "checkpoint": source.folder.name,
            "baseline": twin.name if other else "ours" if is_ours else "auto",
            "baseline_differs_in": other.differs_from(parsed) if other else [],
            "weights": "checkpoint" if _has_weights(flags) else "dummy",
            "format": parsed.format,
            "backbone": parsed.base,
            "layers": parsed.config["num_hidden_layers"],
            "hidden_size": parsed.config["hidden_size"],
            "blocks": parsed.spec.num_blocks if parsed.spec else 0,
            **{key: facts[key] for key in ("dtype", "compiled", "backend", "algorithm")},
            "threads": threads,
            "flags": machine.shown(flags),
            "starts": made,
            "rounds": rounds,
            "discarded_rounds": DISCARDED,
            "procedure": PROCEDURE,
            **document.interval_over(made),
        },
        "took_s": found.took_s,
        "ended_by": "starts" if made == starts else "budget",
        "overhead": {
            contender.name: overheads(found.results, contender.name, BASELINE)
            for contender in contenders[1:]
        },
        **document.content(found, BASELINE),
    }
    return document.Document.model_validate(content).model_dump()
