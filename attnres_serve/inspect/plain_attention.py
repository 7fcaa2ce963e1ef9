"""Causal attention of one sequence without a KV cache of vLLM's, for a replay (``trace``)."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PlainAttention:
    """Attention of one layer to one sequence, which comes in chunks from its beginning.

    Args:
        heads, kv_heads: of this worker.
        scale: factor of the scores.
        window: keys that a query sees, its own among them; None for all.
    """

    def __init__(self, heads: int, kv_heads: int, scale: float, window: int | None) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.scale, self.window = scale, window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to this chunk and all before it.

        Args:
            query: ``[T, heads * d]``, rotated already.
            key, value: ``[T, kv_heads * d]``; they are kept.

        Returns:
            ``[T, heads * d]``.
        """
        tokens = len(query)
        key, value = (x.view(tokens, self.kv_heads, -1) for x in (key, value))
        if self.keys is None or self.values is None:
            self.keys, self.values = key, value
        else:
            self.keys = torch.cat((self.keys, key))
            self.values = torch.cat((self.values, value))
        length = len(self.keys)
        own = torch.arange(length - tokens, length, device=query.device)
        age = own[:, None] - torch.arange(length, device=query.device)
        visible = age >= 0 if self.window is None else (age >= 0) & (age < self.window)
        group = self.heads // self.kv_heads
        keys, values = (
            x.transpose(0, 1).repeat_interleave(group, 0) for x in (self.keys, self.values)
        )
        queries = query.view(tokens, self.heads, -1).transpose(0, 1)
        batch = queries[None], keys[None], values[None]
        (answer,) = scaled_dot_product_attention(*batch, attn_mask=visible, scale=self.scale)
        return answer.transpose(0, 1).reshape(tokens, -1)
