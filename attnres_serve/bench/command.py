"""``attnres-serve bench``: the latency of a checkpoint against its standard-residual twin."""

import argparse
import json
import tempfile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres_serve import output, settings
from attnres_serve.bench import server
from attnres_serve.bench.budget import MINUTES, Budget
from attnres_serve.bench.length import TRIAL, USUAL, Length, add_length, length_of
from attnres_serve.bench.pictures import require_matplotlib
from attnres_serve.bench.workload import STEPS
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
QUICK_STEPS = 16


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
    add_length(parser, USUAL)
    parser.add_argument(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="end before a start that would overrun it; the first start is always finished "
        f"(default: {MINUTES:.0f}; with --starts or --quick: none)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also tell where the time goes, by torch's profiler in the first start; takes as long "
        "as some starts, which the budget does not count",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of each engine (default: cores)")
    parser.add_argument(
        "--control", action="store_true", help="a second baseline, whose ratio should be 1"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="eager, one start, few rounds: a trial, no evidence, and no ratio on a busy machine",
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="keep compiled code there (default: compile anew)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write FILE as .png and .svg")
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
    for name in ("steps", "threads"):
        value = getattr(own, name)
        if value is not None and value < 1:
            raise SettingError(f"--{name} is {value}; expected at least 1.")
    length = length_of(own.starts, own.rounds, TRIAL if own.quick else USUAL)
    budget = budget_of(own, length)
    for flag, path in (("out", own.out), ("plot", own.plot)):
        if path and not Path(path).parent.is_dir():
            raise SettingError(f"--{flag}: {Path(path).parent} is not a folder; make it first.")
    if own.http:
        _refuse_with_http(own)
        served = server.check_there(own.http, own.model, flags)
        from attnres_serve.bench import http

        document = http.measure(checkpoint, own, flags, served)
        shown = http.render(document)
    else:
        if own.plot:
            require_matplotlib("--plot")
        _refuse_without_http(own, flags)
        folder = hub.on_this_machine(checkpoint)
        found = _check(checkpoint, folder, own, flags)
        from attnres_serve.bench import report
        from attnres_serve.checkpoints.convert.source import Source

        source = Source(folder, found.config, found.translated(checkpoint), found.headers)
        document = measure(source, own, flags, length, budget)
        shown = report.render(document)
    from attnres_serve.bench import machine

    document = {"command": machine.command_line(["attnres-serve", *command]), **document}
    from attnres_serve.bench import report

    if not own.json:
        print(report.fitted(shown), file=output.out())
    if own.json or not output.out().isatty():
        print(json.dumps(document), file=output.out())
    if own.out:
        try:
            Path(own.out).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise SettingError(f"{own.out} cannot be written ({error}).") from None
    if own.plot:
        from attnres_serve.bench import plot

        plot.draw(document, Path(own.plot))
    return 0


def budget_of(own: argparse.Namespace, length: Length) -> Budget:
    """The time budget that was asked for, or the usual one, counted from here on.

    Raises:
        SettingError: it is no time, or there is nothing that it could end.
    """
    minutes: float | None = own.budget
    if minutes is None:
        is_usual = own.starts is None and not own.quick
        return Budget(60 * MINUTES if is_usual else inf)
    if not 0 < minutes < inf:
        raise SettingError(f"--budget is {minutes:g}; expected a number of minutes above 0.")
    if length.starts == 1:
        raise SettingError(
            "--budget does not go with one start (--quick, --starts 1), which is always finished; "
            "leave one of the two out."
        )
    return Budget(60 * minutes)


def _refuse_with_http(own: argparse.Namespace) -> None:
    """Refuse what only engines of our own could do."""
    given = vars(own)
    ours = ("quick", "starts", "budget", "profile", "control", "plot", "threads", "cache")
    found = [name for name in (*ours, *settings.CHOICES) if given[name]]
    found += ["baseline"] * (own.baseline != "auto")
    if found:
        raise SettingError(
            f"--{found[0].replace('_', '-')} does not go with --http, which measures a server as "
            "it is."
        )


def _refuse_without_http(own: argparse.Namespace, flags: list[str]) -> None:
    """Refuse what would be dropped, or would make the engines different."""
    from attnres_serve.bench import machine, process

    if own.model:
        raise SettingError("--model goes with --http; here the checkpoint is what is measured.")
    if value_of("--additional-config", flags) is not None:
        raise SettingError(
            "--additional-config would be ours in one engine only; give --attnres-algorithm and "
            "--attnres-backend."
        )
    if value_of("--revision", flags) is not None:
        raise SettingError(
            "--revision is not looked up here; give the folder of that snapshot as CHECKPOINT."
        )
    if own.threads and process.has_workers(flags):
        raise SettingError("--threads is for one worker; bind several by vLLM's variables.")
    if own.threads and not vllm_source.is_cpu_build():
        raise SettingError("--threads is for engines on CPU.")
    if own.threads and own.threads > machine.cores():
        raise SettingError(
            f"--threads is {own.threads}; expected at most {machine.cores()}, the cores there are."
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
    if not own.quick:
        compiler.require(flags)
    return found


def _has_weights(flags: list[str]) -> bool:
    return value_of("--load-format", flags) != "dummy"


def measure(
    source: "Source", own: argparse.Namespace, flags: list[str], length: Length, budget: Budget
) -> dict[str, Any]:
    """The document of a measurement in engines on this machine.

    Args:
        source: the checkpoint; without weights it has no headers.
        own: what ``add_arguments`` defines.
        flags: of vLLM's engine.
        length: of the measurement.
        budget: its time.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    from attnres_serve.bench import baseline, busy, machine, process, report, session, workload
    from attnres_serve.bench.overhead import overheads

    other = None if own.baseline == "auto" else baseline.read_other(own.baseline)
    parsed = source.parsed
    longest = value_of("--max-model-len", flags) or needs.context(parsed.config)
    steps = own.steps or (QUICK_STEPS if own.quick else STEPS)
    cells = workload.make_cells(int(longest), own.prompt_lengths, own.batches, own.contexts, steps)
    threads = own.threads or machine.cores()
    if value_of("--max-model-len", flags) is None:  # its KV cache need not fit
        flags = [*flags, f"--max-model-len={workload.room(cells)}"]
    if own.quick and "--enforce-eager" not in flags:
        flags = [*flags, "--enforce-eager"]
    if not vllm_source.is_cpu_build() and value_of("--gpu-memory-utilization", flags) is None:
        flags = [*flags, f"--gpu-memory-utilization={0.9 / (2 + own.control):.2f}"]  # all stay up
    chosen = settings.given(own)
    load = busy.load_of_others() if own.quick else 0.0
    if (warning := busy.warning(load)) is not None:
        print(report.fitted(warning), file=output.err())
    with tempfile.TemporaryDirectory() as scratch:
        twin = other.folder if other else Path(scratch) / "twin"
        if other is None:
            baseline.write_twin(source, twin)
        is_ours = other is None and baseline.is_ours(FAMILIES[parsed.base])
        plain = process.without_sites if is_ours else process.stock
        contenders = [
            plain(BASELINE, twin, flags),
            process.attnres(ATTNRES, source.folder, flags, chosen),
        ]
        if own.control:
            contenders.append(plain(CONTROL, twin, flags))
        found = session.run(
            contenders,
            cells,
            length,
            threads,
            parsed if own.profile else None,
            own.cache,
            budget,
            tells_ratios=not own.quick,
        )
    gpu = found.engines[ATTNRES]["gpu"]
    document = {
        "benchmark": "bench",
        "quick": own.quick,
        "versions": machine.versions(),
        "hardware": machine.hardware() | ({"gpu": gpu} if gpu else {}),
        "config": {
            "checkpoint": source.folder.name,
            "baseline": twin.name if other else "ours" if is_ours else "auto",
            "baseline_differs_in": other.differs_from(source.parsed) if other else [],
            "weights": "checkpoint" if _has_weights(flags) else "dummy",
            **report.model(parsed),
            **report.setting(found.engines[ATTNRES]),
            "threads": threads,
            "flags": machine.shown(flags),
            "profile": own.profile,
            **length.told(len(found.results), found.rounds),
        },
        "end": report.end(found, budget, BASELINE),
        "trust": None,
        **report.content(found, BASELINE),
        "overhead": overheads(found.results, ATTNRES, BASELINE),
        "control": overheads(found.results, CONTROL, BASELINE) if own.control else None,
    }
    return busy.judge(document, load) if own.quick else document
