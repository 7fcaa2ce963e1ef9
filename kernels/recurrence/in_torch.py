"""The recurrence in plain torch: what the others are held to, and what runs without a compiler.

``operator`` describes the function.
"""

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    slots: Tensor,
    starts: Tensor,
    has_history: Tensor,
    scale: float,
) -> Tensor:
    heads = v.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(v)
    lengths = starts.diff()
    real = (slots > 0) & (lengths > 0)
    blocks, begins, lengths = slots[real].long(), starts[:-1][real].long(), lengths[real]
    kept = state[blocks].to(wide)
    kept[~has_history[real]] = 0
    decay = decay.expand(*v.shape[:2], q.shape[-1])
    # All sequences take a step together, those that have ended stand still.
    for step in range(int(lengths.max()) if len(lengths) else 0):
        going = lengths > step
        token = begins[going] + step
        queries, keys, values = (_of_heads(x[token].to(wide), heads) for x in (q, k, v))
        now = kept[going] * decay[token].unsqueeze(-2)
        if beta is not None:
            recalled = torch.einsum("nhvk,nhk->nhv", now, keys)
            values = (values - recalled) * beta[token].to(wide).unsqueeze(-1)
        now = now + values.unsqueeze(-1) * keys.unsqueeze(-2)
        out[token] = (scale * torch.einsum("nhvk,nhk->nhv", now, queries)).to(out.dtype)
        kept[going] = now
    state[blocks] = kept.to(state.dtype)
    return out


def _of_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)
