"""Cost of a block of sites on a GPU, ours beside other projects' kernels, and what bounds it.

    python -m benchmarks.kernels --out benchmarks/results/h200-kernels.json
    python -m benchmarks.kernels --tokens 1 128 --blocks 9 --hidden 7168 --sites 8
    python -m benchmarks.kernels --out roofline.json                 on a CPU: ``roofline.py``
    TRITON_INTERPRET=1 python -m benchmarks.kernels --gate-only      without a GPU: the gate alone

A cell is T tokens, n finished blocks, hidden size d and a block of S sites; the default cells are
every T of 1, 8, 32, 128, 512, 2048, 8192, 16384 with n of 1, 2, 4, 6, 9, d of 768, 1024, 2048,
4096, 7168 and S of 2, 8, 24, in bf16.  A cell that does not
fit into memory is left out, and so are those that ``--minutes`` does not suffice for; both are
named.  A later run finds what an earlier one compiled.

Nothing is timed that is not right: in each cell every site of every contender is first compared
with ``kernels/reference.py`` in float64 (``kernel_gate``).  Then every site is a CUDA graph between
two events, with L2 cold, and the contenders run in turn, every round in another order
(``kernel_timing``).  Bytes are those of the algorithm when each launch reads and writes everything
once (``traffic.py``); the floor is the time in which a copy, measured in the same run,
moves as many.  ``launch_us`` is what the method gives for a kernel that does next to nothing: it is
in every site's time and not in the floor.

A line for each cell and contender is on stdout, what is left out and why on stderr.  The last line
on stdout is one JSON document without the rows; the file that ``--out`` names holds them too.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

from attnres_serve import __version__
from attnres_serve.bench.machine import command_line, hardware
from attnres_serve.kernels import fingerprint
from benchmarks.common import write
from benchmarks.kernels import cells as kernel_cells
from benchmarks.kernels import contenders as kernel_contenders
from benchmarks.kernels import gate as kernel_gate
from benchmarks.kernels import peers as kernel_peers
from benchmarks.kernels import report as kernel_report
from benchmarks.kernels.cells import Cell
from benchmarks.kernels.contenders import Contender, Run

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NO_INTERPRETER = (
    "there is no CUDA device here: --gate-only needs TRITON_INTERPRET=1 in the environment."
)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    for name, default in (
        ("tokens", kernel_cells.TOKENS),
        ("blocks", kernel_cells.BLOCKS),
        ("hidden", kernel_cells.HIDDEN),
        ("sites", kernel_cells.SITES),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(f"--{name}", type=_positive, nargs="+", help=f"default: {shown}")
    parser.add_argument("--contenders", nargs="+", help="by name; default: all that are here")
    parser.add_argument("--vllm-file", type=Path, help="attn_res.py of vLLM's Kimi K3")
    parser.add_argument("--rounds", type=_positive, default=15)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no cell later than that")
    parser.add_argument(
        "--gate-only", action="store_true", help="compare the results, time nothing"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16; interpreted, float32")
    parser.add_argument("--out", type=Path, help="write the document there")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def chosen_cells(options: argparse.Namespace, interpreted: bool) -> list[Cell]:
    """Cells that the command line asks for; the default of its mode if no flag gives a shape."""
    shape = options.tokens, options.blocks, options.hidden, options.sites
    if not any(shape) and interpreted:
        return list(kernel_cells.TINY)
    defaults = kernel_cells.TOKENS, kernel_cells.BLOCKS, kernel_cells.HIDDEN, kernel_cells.SITES
    return kernel_cells.grid(
        *(value or default for value, default in zip(shape, defaults, strict=True))
    )


def chosen_contenders(
    options: argparse.Namespace, here: dict[str, Contender], interpreted: bool
) -> dict[str, Contender]:
    """By name; in the interpreter ours unless others are named: they would compile, or need CUDA.

    Raises:
        ValueError: a name is not among those that are here.
    """
    names = options.contenders or [n for n, one in here.items() if one.ours or not interpreted]
    if unknown := [name for name in names if name not in here]:
        raise ValueError(f"no contender {', '.join(unknown)} here; there are {', '.join(here)}.")
    return {name: here[name] for name in names}


def examine_cell(
    cell: Cell, contenders: dict[str, Contender], device: str, dtype: torch.dtype
) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """Set up the contenders of a cell and compare them with the reference.

    Returns:
        Those that pass, ready to be timed; their largest errors in units of what is allowed; and
        what is wrong with the others.
    """
    inputs = kernel_cells.draw(cell, device, dtype)
    runs, broken = {}, {}
    for name, contender in contenders.items():
        try:
            runs[name] = contender.start(inputs)
        except Exception as error:  # another project's code may raise anything
            broken[name] = f"it does not start: {kernel_gate.first_line(error)}"
    errors, failures = kernel_gate.examine(inputs, runs, contenders)
    return {name: runs[name] for name in errors}, errors, broken | failures


def environment(device: str) -> dict[str, Any]:
    """Device, driver and the versions that compile the kernels; the machine without its name."""
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "attnres_serve": __version__,
        "attnres_serve_source": fingerprint.source(),
    }
    if device == "cpu":
        return {"device": "cpu, Triton's interpreter", "versions": versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


Finish = Callable[[Cell, dict[str, Run], dict[str, float]], tuple[list[dict], dict[str, str]]]


def run_cells(
    cells: list[Cell],
    contenders: dict[str, Contender],
    device: str,
    dtype: torch.dtype,
    minutes: float,
    finish: Finish,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Cell]]:
    """Gate every cell and give what passes to ``finish``, which returns rows and failures.

    Returns:
        The rows; what failed, each with cell, contender (None for the cell as a whole) and reason;
        and the cells that time did not suffice for.
    """
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    begin = time.monotonic()
    with tqdm(cells, unit="cell", file=sys.stderr) as progress:
        for index, cell in enumerate(progress):
            if time.monotonic() - begin > 60 * minutes:
                return rows, failures, cells[index:]
            progress.set_postfix_str(str(cell))
            wrong: dict[str | None, str] = {}
            try:
                passed, errors, failed = examine_cell(cell, contenders, device, dtype)
                wrong |= failed
                measured, failed = finish(cell, passed, errors)
                wrong |= failed
                rows += measured
            except Exception as error:  # one cell, out of memory perhaps, must not cost the others
                wrong[None] = kernel_gate.first_line(error)
            passed = {}  # before the next cell takes memory
            if device == "cuda":
                torch.cuda.empty_cache()
            for name, reason in wrong.items():
                failures.append({**cell._asdict(), "contender": name, "reason": reason})
                what = name or "the cell"
                tqdm.write(f"{cell}: {what} is not timed: {reason}", file=sys.stderr)
    return rows, failures, []


def main(arguments: list[str] | None = None) -> int:
    """Gate and measure what the command line asks for; 1 where that cannot be, or one of ours
    or a whole cell failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cuda = torch.cuda.is_available()
    if not cuda and "--gate-only" not in arguments:
        from benchmarks.kernels import roofline  # which needs vLLM

        return roofline.main(arguments)
    options = options_of(arguments)
    interpreted = not cuda and os.environ.get("TRITON_INTERPRET") == "1"
    peers, sources, absent = kernel_peers.find(options.vllm_file)
    here = kernel_contenders.CONTENDERS | peers
    if not cuda and not interpreted:
        return _refuse(NO_INTERPRETER)
    try:
        contenders = chosen_contenders(options, here, interpreted)
    except ValueError as error:
        return _refuse(str(error))
    device = "cuda" if cuda else "cpu"
    # The interpreter truncates to bf16 where compiled code rounds, so there the default is float32.
    dtype = DTYPES[options.dtype or ("float32" if interpreted else "bfloat16")]

    cells, too_large = chosen_cells(options, interpreted), []
    if cuda:
        free, _ = torch.cuda.mem_get_info()
        cells, too_large = kernel_cells.split_by_memory(cells, len(contenders), dtype, free)
    for name, reason in absent.items():
        print(f"{name} is absent: {reason}", file=sys.stderr)
    if too_large:
        print(f"left out, too large for memory: {_listed(too_large)}", file=sys.stderr)

    method: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "timed": False}
    if options.gate_only:

        def finish(cell: Cell, passed: dict, errors: dict) -> tuple[list[dict], dict]:
            for name, off in errors.items():
                line = f"{cell} {name}: right, {off:.3f} of what it may be off"
                tqdm.write(line, file=sys.stdout)
            return [{**cell._asdict(), "contender": n, "gate": e} for n, e in errors.items()], {}
    else:
        from benchmarks.kernels import timing as kernel_timing

        cache = kernel_timing.ColdCache(device)
        stopwatch = kernel_timing.Stopwatch(
            cache, max(kernel_cells.SITES + tuple(c.sites for c in cells))
        )
        bandwidth = kernel_timing.copy_bandwidth(stopwatch, device)
        method |= {
            "timed": True,
            "rounds": options.rounds,
            "discarded_rounds": kernel_timing.DISCARDED,
            "cold_bytes": cache.bytes,
            "copy_bytes_per_s": bandwidth,
            "launch_us": kernel_timing.launch_time(stopwatch, device),
        }

        def finish(cell: Cell, passed: dict, errors: dict) -> tuple[list[dict], dict]:
            samples, failed = kernel_timing.measure(passed, options.rounds, stopwatch)
            rows = kernel_report.summarise(cell, samples, contenders, errors, dtype, bandwidth)
            for row in rows:
                us, share = row["block_us"]["median"], row["floor_share"]
                line = f"{cell} {row['contender']}: {us:.1f} us, {share:.0%} of a copy's speed"
                tqdm.write(line, file=sys.stdout)
            return rows, failed

    rows, failures, too_late = run_cells(cells, contenders, device, dtype, options.minutes, finish)
    if too_late:
        print(f"left out, --minutes is over: {_listed(too_late)}", file=sys.stderr)
    if method["timed"]:
        method["copy_bytes_per_s_at_end"] = kernel_timing.copy_bandwidth(stopwatch, device)
    document = {
        "benchmark": "kernels",
        "command": command_line(["python", "-m", "benchmarks.kernels", *arguments]),
        "hardware": hardware(),
        **environment(device),
        "method": method,
        "contenders": {
            name: {
                "source": sources.get(name, "this project" if one.ours else "torch"),
                "algorithm": one.algorithm,
                "fused": one.fused,
            }
            for name, one in contenders.items()
        },
        "absent": absent,
        "failures": failures,
        "left_out": {
            "memory": [cell._asdict() for cell in too_large],
            "time": [cell._asdict() for cell in too_late],
        },
    }
    if options.out is not None:
        write(document | {"results": rows}, options.out)
    left_out = {why: len(left) for why, left in document["left_out"].items()}
    print(json.dumps(document | {"left_out": left_out, "rows": len(rows)}))
    names = {failure["contender"] for failure in failures}
    return 1 if any(name is None or contenders[name].ours for name in names) else 0


def _listed(cells: list[Cell]) -> str:
    return "; ".join(map(str, cells))


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
