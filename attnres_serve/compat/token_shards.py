"""The tokens of a step over the workers of tensor parallelism, each with as many rows of them.

Rows behind the last token are zeros.  Every worker calls a function at the same moment.
"""

from typing import Any

from attnres_serve import settings
from attnres_serve.depth.layout import ONE

# What a sublayer may be called in a layer of vLLM's, by its kind.
CHILDREN = {
    "attention": ("self_attn", "linear_attn", "attention", "attn", "short_conv"),
    "mlp": ("mlp", "feed_forward"),
    ONE: ("mixer",),
}


def least(vllm_config) -> int | None:
    """Tokens of the smallest step that is divided; None where no step is."""
    smallest = settings.shard_tokens(vllm_config.additional_config)
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return None if smallest is None or tokens < smallest else smallest


def most(vllm_config) -> int:
    """The most tokens of a step of which a worker runs the sites."""
    tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
    divided = least(vllm_config)
    if divided is None:
        return tokens
    return max(divided - 1, -(-tokens // vllm_config.parallel_config.tensor_parallel_size))


def own_rows(x: Any) -> Any:
    """A copy of this worker's rows of ``x [T, ...]``, which every worker has."""
    group = _group()
    count = -(-len(x) // group.world_size)
    begin = group.rank_in_group * count
    rows_here = x.new_zeros((count, *x.shape[1:]))
    rows = x[begin : begin + count]
    rows_here[: len(rows)] = rows
    return rows_here


def own_rows_of_sum(x: Any) -> Any:
    """This worker's rows of the sum of the workers' ``x [T, d]``."""
    import torch

    group = _group()
    missing = -len(x) % group.world_size
    return group.reduce_scatter(torch.nn.functional.pad(x, (0, 0, 0, missing)), dim=0)


def whole_sum(x: Any) -> Any:
    """The sum of the workers' ``x [T, d]``; on a CPU it is written over ``x``."""
    return _group().all_reduce(x)


def gathered(x: Any, tokens: int) -> Any:
    """The rows of all workers, ``[tokens, d]``, of which each has some, ``x``."""
    return _group().all_gather(x, dim=0)[:tokens]


def leave_sum(layer, kind: str) -> bool:
    """Let the row-parallel layer of a sublayer leave its worker's part of the sum as it is.

    Args:
        layer: of a decoder.
        kind: of the sublayer.

    Returns:
        Whether it does so now.  A mixture of experts has its row-parallel layers deeper, and adds
        up itself, as does a kernel that vLLM has for Kimi Linear on GPUs.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    sublayers = [getattr(layer, name) for name in CHILDREN.get(kind, ()) if hasattr(layer, name)]
    summing = [
        module
        for sublayer in sublayers[:1]
        if getattr(sublayer, "gemm_rs_ar", None) is None
        for module in sublayer.children()
        if isinstance(module, RowParallelLinear) and module.reduce_results
    ]
    if len(summing) != 1:
        return False
    summing[0].reduce_results = False
    return True


def _group() -> Any:
    from vllm.distributed import get_tp_group

    return get_tp_group()
