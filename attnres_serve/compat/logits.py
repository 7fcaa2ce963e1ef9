"""Logits of vectors that a replay gave, which pipeline stages send on to the last one."""

from typing import Any


def collected(rows: Any | None) -> Any | None:
    """Collect rows of all pipeline stages on the last one, through the host.

    Every worker calls this at the same time.  A stage sends one tensor, because vLLM's shared
    memory takes eight per message.

    Args:
        rows: ``[n, d]`` on the CPU; None for none.

    Returns:
        On the last stage the rows of all stages in order; None on the others, and without rows.
    """
    import torch
    from vllm.distributed import get_pp_group

    stages = get_pp_group()
    if not stages.is_first_rank:
        before = stages.recv_tensor_dict().get("rows")
        parts = [part for part in (before, rows) if part is not None]
        rows = torch.cat(parts) if parts else None
    if not stages.is_last_rank:
        stages.send_tensor_dict({} if rows is None else {"rows": rows})
        return None
    return rows


def logits(model, hidden) -> Any:
    """The logits ``[T, vocabulary]`` for a decoder's output ``[T, d]``.

    None on a worker whose part another worker gathers.
    """
    return model.compute_logits(hidden)
