"""Sharding the tokens of a step over the workers of tensor parallelism, with equal rows for each.

Rows after the last token are zeros.  All workers call a function at the same time.
"""

from typing import Any

from attnres_serve import settings
from attnres_serve.depth.layout import ONE

# Names of sublayers in vLLM's layers, by kind.
CHILDREN = {
    "attention": ("self_attn", "linear_attn", "attention", "attn", "short_conv"),
    "mlp": ("mlp", "feed_forward"),
    ONE: ("mixer",),
}


def least(vllm_config) -> int | None:
    """Tokens of the smallest step that is sharded; None if none is."""
    smallest = settings.shard_tokens(vllm_config.additional_config)
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return None if smallest is None or tokens < smallest else smallest


def most(vllm_config) -> int:
    """The most tokens of a step for which a worker runs the sites."""
    tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
    divided = least(vllm_config)
    if divided is None:
        return tokens
    return max(divided - 1, -(-tokens // vllm_config.parallel_config.tensor_parallel_size))


def local_rows(x: Any) -> Any:
    """A copy of this worker's rows of ``x [T, ...]``, which all workers have."""
    group = _group()
    count = -(-len(x) // group.world_size)
    begin = group.rank_in_group * count
    rows_here = x.new_zeros((count, *x.shape[1:]))
    rows = x[begin : begin + count]
    rows_here[: len(rows)] = rows
    return rows_here


def local_rows_of_sum(x: Any) -> Any:
    """This worker's rows of the sum of the workers' ``x [T, d]``."""
    import torch

    group = _group()
    missing = -len(x) % group.world_size
    return group.reduce_scatter(torch.nn.functional.pad(x, (0, 0, 0, missing)), dim=0)


def whole_sum(x: Any) -> Any:
    """The sum of the workers' ``x [T, d]``; on a CPU it overwrites ``x``."""
    return _group().all_reduce(x)


def gathered(x: Any, tokens: int) -> Any:
    """The rows of all workers, ``[tokens, d]``, from each worker's rows ``x``."""
    return _group().all_gather(x, dim=0)[:tokens]


def leave_sum(layer, kind: str) -> bool:
    """Stop the row-parallel layer of a sublayer from summing over workers.

    Args:
        layer: of a decoder.
        kind: of the sublayer.

    Returns:
        Whether it worked.  A mixture of experts has its row-parallel layers deeper, and sums
        itself. So does vLLM's kernel for Kimi Linear on GPUs.
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
