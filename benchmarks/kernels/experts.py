"""Cost of experts with Kimi K3's activation on CPU, beside vLLM's experts with SiLU.

    python -m benchmarks.kernels.experts --out benchmarks/results/cpu-experts.json

Microseconds of a layer's routed experts, on one thread: those of this project, which SiTU needs,
and vLLM's fused ones of the same size on packed weights.  Both have the same tokens and routes, of
which there are several so that weights come from memory, and take turns, round after round; the
ratio is taken within a round.  The target is at most 1.5.  The last line on stdout is one JSON
document; the table goes to stderr.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops as stock

from attnres_serve.compat.workarounds import amx
from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.experts import situ_experts
from benchmarks.common import spread
from benchmarks.kernels import one_thread
from benchmarks.published import tables

LAYERS = 4  # whose weights do not stay in the caches
OURS, STOCK = "situ", "vllm_silu"
BETAS = 4.0, 25.0


class Cell(NamedTuple):
    tokens: int
    experts: int = 64
    top_k: int = 4
    latent: int = 512
    width: int = 448
    dtype: str = "bfloat16"


CELLS = (
    *(Cell(tokens) for tokens in (1, 8, 64, 512)),
    *(Cell(tokens, 8, 2, 512, 1024) for tokens in (1, 8, 512)),
    *(Cell(tokens, dtype="float32") for tokens in (1, 512)),
)


def calls(cell: Cell) -> dict[str, Callable[[], torch.Tensor]]:
    """What computes the experts of all layers, by its name; random numbers, always the same."""
    cpp.prepare()
    amx.permit_amx()
    torch.manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    x = torch.randn(cell.tokens, cell.latent).to(dtype)
    ids = torch.rand(cell.tokens, cell.experts).argsort()[:, : cell.top_k].contiguous()
    shares = torch.rand(cell.tokens, cell.top_k)
    shapes = (2 * cell.width, cell.latent), (cell.latent, cell.width)
    layers = [
        [(torch.randn(cell.experts, *shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]
        for _ in range(LAYERS)
    ]
    isa = "amx" if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16 else "vec"
    packed = [[stock.cpu_prepack_moe_weight(w, isa) for w in layer] for layer in layers]
    out, few = torch.empty_like(x), ids.int()

    def ours() -> torch.Tensor:
        for gate_up, down in layers:
            out.copy_(situ_experts(x, gate_up, down, shares, ids, *BETAS))
        return out

    def vllms() -> torch.Tensor:
        for gate_up, down in packed:
            stock.cpu_fused_moe(out, x, gate_up, down, None, None, shares, few, "silu", isa, False)
        return out

    return {OURS: ours, STOCK: vllms}


def timed(run: Callable[[], object]) -> float:
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """The row of a cell."""
    runs = {name: partial(timed, run) for name, run in calls(cell).items()}
    times = one_thread.in_turn(runs, max(1, 64 // cell.tokens), rounds)
    return {
        **cell._asdict(),
        "microseconds": {
            name: spread([1e6 * one[name] / LAYERS for one in times]) for name in runs
        },
        "ratio": spread([one[OURS] / one[STOCK] for one in times]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure every cell and print one JSON document."""
    about = __doc__.partition("\n")[0]
    return one_thread.run(
        "kernels.experts", about, arguments, CELLS, measure, tables.experts, LAYERS
    )


if __name__ == "__main__":
    sys.exit(main())
