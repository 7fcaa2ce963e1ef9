"""What the kernels would take on H100 and H200, by a model over their machine code.

    python -m benchmarks.kernels.model --out benchmarks/results/gpu-model.json

Nothing is measured.  A launch is compiled for sm_90 and its instructions are issued in order, cycle
by cycle, on one SM (``issue``); ``machine`` has the latencies and rates, ``anchors`` the published
figures that it is held to.  The last line on stdout is one JSON document:

* ``anchors``: a published time and the model's,
* ``launches``: microseconds of each, by GPU and number of tokens, and at one token also if all that
  it reads is in L2,
* ``blocks``: a block of sites by each algorithm, and its ratio to the single pass,
* ``shapes``: what a whole model's sites add to a step,
* ``plans``: two-phase over the single pass for whole models of other blocks,
* ``configs``: what other configs of the kernels would give.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas

from attnres_serve.bench.machine import command_line, versions
from attnres_serve.kernels.triton.common import Config
from attnres_serve.kernels.triton.mix_group import PartConfig
from attnres_serve.kernels.triton.score_group import ProductConfig
from attnres_serve.kernels.triton.two_phase import GroupConfig
from benchmarks.common import write
from benchmarks.kernels.model import anchors, launches, shapes
from benchmarks.kernels.model.launches import ALGORITHMS, Launch, Part
from benchmarks.kernels.model.machine import GPUS

HIDDEN = (1024, 4096, 7168, 8192)
ROWS = (1, 4, 8)
SITES = (8, 24)
TOKENS = (1, 64, 512, 2048, 8192)
OF_MANY = ("score_group", "weigh_group", "mix_group")
# Configs that the tables had or might have: kernel, hidden size, sites, config.
CANDIDATES: list[tuple[str, int, int, Any]] = [
    *(("open_group", 512, 8, GroupConfig(*c)) for c in ((4, 2), (4, 1))),
    *(("open_group", 1024, 8, GroupConfig(*c)) for c in ((4, 4), (4, 2), (2, 2), (2, 1))),
    *(("open_group", 2048, 8, GroupConfig(*c)) for c in ((4, 8), (4, 4), (2, 2))),
    *(("open_group", 4096, 8, GroupConfig(*c)) for c in ((4, 16), (2, 4), (2, 8), (4, 8))),
    *(("open_group", 7168, 8, GroupConfig(*c)) for c in ((2, 16), (2, 8), (1, 4))),
    *(("open_group", 8192, 8, GroupConfig(*c)) for c in ((2, 16), (2, 8), (1, 4))),
    *(
        ("score_group", hidden, sites, ProductConfig(*c))
        for hidden in (1024, 7168)
        for sites in SITES
        for c in ((32, 64, 2), (64, 32, 2), (64, 64, 2), (128, 64, 4))
    ),
    *(("mix_group", 1024, 24, PartConfig(*c)) for c in ((8, 256, 1), (8, 512, 2), (4, 512, 2))),
    *(("mix_group", 2048, 24, PartConfig(*c)) for c in ((8, 256, 1), (8, 512, 2), (8, 1024, 4))),
    *(("mix_group", 4096, 24, PartConfig(*c)) for c in ((8, 512, 2), (8, 1024, 4), (16, 512, 4))),
    *(("mix_group", 7168, 24, PartConfig(*c)) for c in ((8, 512, 2), (8, 1024, 4), (8, 2048, 8))),
    *(("single_pass", 1024, 1, Config(*c)) for c in ((2, 4), (2, 2), (1, 2))),
    *(("single_pass", 4096, 1, Config(*c)) for c in ((2, 8), (1, 4))),
]


def times(parts: Sequence[Part]) -> dict[str, dict[str, float]]:
    """Microseconds by GPU and tokens; ``1 from L2``: one token whose rows are in L2."""
    found = {}
    for name, gpu in GPUS.items():
        found[name] = {
            str(tokens): round(1e6 * launches.seconds(parts, tokens, gpu), 2) for tokens in TOKENS
        }
        found[name]["1 from L2"] = round(1e6 * launches.seconds(parts, 1, gpu, True), 2)
    return found


def described(launch: Launch) -> dict[str, Any]:
    binary = launch.binary()
    return {
        "kernel": launch.kernel,
        "hidden": launch.hidden,
        "rows": launch.rows,
        "sites": launch.sites,
        "config": binary.config,
        "registers": binary.registers,
        "programs_per_sm": binary.resident,
        "microseconds": times([Part(1, launch)]),
    }


def launch_rows(hidden: Sequence[int]) -> list[dict[str, Any]]:
    """Every launch at every size."""
    rows = []
    for size in hidden:
        rows.append(described(Launch("merge", size, ROWS[-1])))
        rows += [described(Launch("score", size, 1, sites - 1)) for sites in SITES]
        for count in ROWS:
            rows.append(described(Launch("single_pass", size, count)))
            rows.append(described(Launch("mix_scored", size, count)))
            rows += [described(Launch("open_group", size, count - 1, sites)) for sites in SITES]
        rows += [described(Launch(name, size, ROWS[-1] - 1, s)) for name in OF_MANY for s in SITES]
    return rows


def block_rows(hidden: Sequence[int], counts: Sequence[int] = ROWS) -> list[dict[str, Any]]:
    """Every block by every algorithm."""
    rows = []
    for size, count, sites in ((d, n, s) for d in hidden for n in counts for s in SITES):
        found = {name: times(made(size, count, sites)) for name, made in ALGORITHMS.items()}
        single = found["single_pass"]
        ratios = {
            name: {
                gpu: {at: round(us / single[gpu][at], 3) for at, us in by_tokens.items()}
                for gpu, by_tokens in found[name].items()
            }
            for name in found
            if name != "single_pass"
        }
        block = {"hidden": size, "rows": count, "sites": sites}
        rows.append(block | {"microseconds": found, "over_single_pass": ratios})
    return rows


def config_rows() -> list[dict[str, Any]]:
    """A launch over eight rows by each of the candidates."""
    rows = []
    for kernel, hidden, sites, config in CANDIDATES:
        launch = Launch(kernel, hidden, 7 if sites > 1 else 8, sites)
        used = launch.binary().config
        row = described(launch._replace(config=config))
        rows.append(row | {"in_use": row["config"] == used})
    return rows


def anchor_rows(file: Path | None) -> list[dict[str, Any]]:
    """Nothing where there is no vLLM."""
    if file is None:
        return []
    rows = []
    for anchor in anchors.ANCHORS:
        model = anchors.model_us(anchor, file)
        source = {"source": anchors.SOURCES[anchor.table]}
        rows.append(anchor._asdict() | {"model_us": round(model, 2)} | source)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN))
    parser.add_argument(
        "--vllm-file", type=Path, help=f"the anchors' kernel, vLLM's {anchors.FILE}"
    )
    parser.add_argument("--out", type=Path)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    document = {
        "benchmark": "kernels.model",
        "kind": "model, not measured",
        "command": command_line(["python", "-m", "benchmarks.kernels.model", *arguments]),
        "versions": versions()
        | {"triton": triton.__version__, "ptxas": get_ptxas(launches.ARCH).version},
        "anchors": anchor_rows(options.vllm_file or anchors.installed()),
        "launches": launch_rows(options.hidden),
        "blocks": block_rows(options.hidden),
        "shapes": shapes.rows(),
        "plans": shapes.plans(),
        "configs": config_rows(),
    }
    if options.out is not None:
        write(document, options.out)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
