"""``attnres-serve bench``: the latency of a checkpoint against its standard-residual twin."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from attnres_serve import settings
from attnres_serve.bench.length import TRIAL, USUAL, Length, add_length, length_of
from attnres_serve.bench.workload import STEPS
from attnres_serve.errors import SettingError
from attnres_serve.server.launcher import usual, value_of

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
    parser.add_argument("--threads", type=int, metavar="N", help="of each engine (default: cores)")
    parser.add_argument(
        "--control", action="store_true", help="a second baseline, whose ratio should be 1"
    )
    parser.add_argument(
        "--quick", action="store_true", help="eager, one start, few rounds: a trial, no evidence"
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="keep compiled code there (default: compile anew)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write FILE as .png and .svg")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON document there")
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
    """Measure what the command line asks for; the last line on stdout is one JSON document.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        own: what ``add_arguments`` defines.
        flags: any other, which are vLLM's engine's.
        command: the whole command line.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    from attnres_serve.bench import machine, report

    if checkpoint is None:
        raise SettingError(
            "bench needs a checkpoint as its first argument, the flags behind it: attnres-serve "
            "bench CHECKPOINT ..."
        )
    flags = [usual(word) for word in flags]
    for name in ("steps", "threads"):
        value = getattr(own, name)
        if value is not None and value < 1:
            raise SettingError(f"--{name} is {value}; expected at least 1.")
    length = length_of(own.starts, own.rounds, TRIAL if own.quick else USUAL)
    for flag, path in (("out", own.out), ("plot", own.plot)):
        if path and not Path(path).parent.is_dir():
            raise SettingError(f"--{flag}: {Path(path).parent} is not a folder; make it first.")
    if own.http:
        _refuse_with_http(own)
        from attnres_serve.bench import http

        document = http.measure(checkpoint, own, flags)
        shown = http.render(document)
    else:
        if own.plot:
            from attnres_serve.bench import plot

            plot.require_matplotlib("--plot")
        _refuse_without_http(own, flags)
        document = measure(checkpoint, own, flags, length)
        shown = report.render(document)
    document = {"command": machine.command_line(["attnres-serve", *command]), **document}
    print(shown)
    print(json.dumps(document))
    if own.out:
        try:
            Path(own.out).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise SettingError(f"{own.out} cannot be written ({error}).") from None
    if own.plot:
        plot.draw(document, Path(own.plot))
    return 0


def _refuse_with_http(own: argparse.Namespace) -> None:
    """Refuse what only engines of our own could do."""
    given = vars(own)
    ours = ("quick", "starts", "control", "plot", "threads", "cache", *settings.CHOICES)
    found = [name for name in ours if given[name]] + ["baseline"] * (own.baseline != "auto")
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
    if own.threads and not process.on_cpu():
        raise SettingError("--threads is for engines on CPU.")
    if own.threads and own.threads > machine.cores():
        raise SettingError(
            f"--threads is {own.threads}; expected at most {machine.cores()}, the cores there are."
        )


def measure(
    checkpoint: str, own: argparse.Namespace, flags: list[str], length: Length
) -> dict[str, Any]:
    """The document of a measurement in engines on this machine."""
    from attnres_serve.bench import baseline, machine, process, report, session, workload
    from attnres_serve.bench.overhead import overheads

    has_weights = value_of("--load-format", flags) != "dummy"
    source = baseline.read(checkpoint, has_weights)
    other = None if own.baseline == "auto" else baseline.read_other(own.baseline)
    translation = source.translation
    longest = value_of("--max-model-len", flags) or translation.config["max_position_embeddings"]
    if not str(longest).isdigit():
        raise SettingError(f"--max-model-len is {longest}; expected a whole number of tokens.")
    steps = own.steps or (QUICK_STEPS if own.quick else STEPS)
    cells = workload.make_cells(int(longest), own.prompt_lengths, own.batches, own.contexts, steps)
    threads = own.threads or machine.cores()
    if value_of("--max-model-len", flags) is None:  # its KV cache need not fit
        flags = [*flags, f"--max-model-len={workload.room(cells)}"]
    if own.quick and "--enforce-eager" not in flags:
        flags = [*flags, "--enforce-eager"]
    if not process.on_cpu() and value_of("--gpu-memory-utilization", flags) is None:
        flags = [*flags, f"--gpu-memory-utilization={0.9 / (2 + own.control):.2f}"]  # all stay up
    chosen = settings.given(own)
    with tempfile.TemporaryDirectory() as scratch:
        twin = other.folder if other else Path(scratch) / "twin"
        if other is None:
            baseline.write_twin(source, twin)
        contenders = [
            process.stock(BASELINE, twin, flags),
            process.attnres(ATTNRES, source.folder, flags, chosen),
        ]
        if own.control:
            contenders.append(process.stock(CONTROL, twin, flags))
        found = session.run(contenders, cells, length, threads, translation, own.cache)
    gpu = found.engines[ATTNRES]["gpu"]
    return {
        "benchmark": "bench",
        "quick": own.quick,
        "versions": machine.versions(),
        "hardware": machine.hardware() | ({"gpu": gpu} if gpu else {}),
        "config": {
            "checkpoint": source.folder.name,
            "baseline": twin.name if other else "auto",
            "baseline_differs_in": other.differs_from(source.translation) if other else [],
            "weights": "checkpoint" if has_weights else "dummy",
            **report.model(translation),
            **report.setting(found.engines[ATTNRES]),
            "algorithm": settings.algorithm(chosen),
            "threads": threads,
            "flags": machine.shown(flags),
            **length.told(len(found.results)),
        },
        **report.content(found, BASELINE),
        "overhead": overheads(found.results, ATTNRES, BASELINE),
        "control": overheads(found.results, CONTROL, BASELINE) if own.control else None,
    }
