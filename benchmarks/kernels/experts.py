"""Cost of experts with Kimi K3's activation on CPU, beside vLLM's experts with SiLU.

    python -m benchmarks.kernels.experts --out benchmarks/results/cpu-experts.json

Measures the microseconds that the routed experts of one layer take on one thread: the experts of
this project, which support SiTU, and vLLM's fused experts of the same size on packed weights.  Both
compute the same tokens with the same chosen experts.  Each call computes several layers, so that
the weights come from memory instead of from caches.  Both take turns in every round; the ratio is
taken within a round.  The target is a ratio of at most 1.5.  The last line on stdout is one JSON
document; the table goes to stderr.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops as vllm_ops

from attnres_serve.compat.workarounds import amx
from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.experts import situ_experts
from benchmarks.common import spread
from benchmarks.kernels import one_thread
from benchmarks.published import tables

LAYERS = 4  # computed by each call; together, their weights do not fit in the caches
OURS, VLLMS = "situ", "vllm_silu"
SITU_BOUNDS = 4.0, 25.0  # beta and clip of ``situ_experts``


class Cell(NamedTuple):
    """The sizes of one row of the table.

    Attributes:
        tokens: tokens of a step.
        experts: routed experts of a layer.
        top_k: experts that each token chooses.
        latent: channels that an expert reads and writes.
        width: channels between an expert's two products.
        dtype: of tokens and weights.
    """

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


def make_calls(cell: Cell) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that compute the experts of all layers, by name; the random numbers are fixed."""
    cpp.prepare()
    amx.permit_amx()
    torch.manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    hidden = torch.randn(cell.tokens, cell.latent).to(dtype)
    expert_ids = torch.rand(cell.tokens, cell.experts).argsort()[:, : cell.top_k].contiguous()
    shares = torch.rand(cell.tokens, cell.top_k)  # of each chosen expert in a token's output
    shapes = (2 * cell.width, cell.latent), (cell.latent, cell.width)
    layers = [
        [(torch.randn(cell.experts, *shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]
        for _ in range(LAYERS)
    ]
    isa = "amx" if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16 else "vec"
    packed = [
        [vllm_ops.cpu_prepack_moe_weight(weight, isa) for weight in layer] for layer in layers
    ]
    out, int_ids = torch.empty_like(hidden), expert_ids.int()

    def run_ours() -> torch.Tensor:
        for gate_up, down in layers:
            out.copy_(situ_experts(hidden, gate_up, down, shares, expert_ids, *SITU_BOUNDS))
        return out

    def run_vllms() -> torch.Tensor:
        for gate_up, down in packed:
            vllm_ops.cpu_fused_moe(
                out, hidden, gate_up, down, None, None, shares, int_ids, "silu", isa, False
            )
        return out

    return {OURS: run_ours, VLLMS: run_vllms}


def seconds(call: Callable[[], object]) -> float:
    """The CPU seconds of this thread during a call."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """The row of a cell in the document."""
    timed_calls = {name: partial(seconds, call) for name, call in make_calls(cell).items()}
    repeats = max(1, 64 // cell.tokens)  # more for short calls
    seconds_of_rounds = one_thread.in_turn(timed_calls, repeats, rounds)
    return {
        **cell._asdict(),
        "microseconds": {
            name: spread([1e6 * by_name[name] / LAYERS for by_name in seconds_of_rounds])
            for name in timed_calls
        },
        "ratio": spread([by_name[OURS] / by_name[VLLMS] for by_name in seconds_of_rounds]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure every cell and print one JSON document."""
    description = __doc__.partition("\n")[0]
    return one_thread.run(
        "kernels.experts", description, arguments, CELLS, measure, tables.experts, LAYERS
    )


if __name__ == "__main__":
    sys.exit(main())
