"""Causal grouped-query attention."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_serve.verify.oracle.norm import rms_norm
from attnres_serve.verify.oracle.rotary import Rope, rotate
from attnres_serve.verify.oracle.sublayers.sublayer import Shape, Sublayer, Weights, linear_shapes


@dataclass(frozen=True)
class Attention(Sublayer):
    """Causal grouped-query attention, in a sliding window or over the whole past.

    Attributes:
        window: number of tokens that a query sees, including its token; None: all.
        qk_norm_eps: epsilon of the norms of each head's queries and keys; None: no such norms.
        norms_rotated_keys: whether keys are normed after the rotation; queries never are.
        qkv_bias: whether q_proj, k_proj and v_proj have biases.
        output_bias: whether o_proj has a bias.
        fused_qkv: whether c_attn computes queries, keys and values side by side.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    qk_norm_eps: float | None = None
    norms_rotated_keys: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    fused_qkv: bool = False

    def shapes(self, hidden: int) -> dict[str, Shape]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        if self.fused_qkv:
            inputs = {"c_attn": 3 * hidden}
        shapes = linear_shapes(inputs, hidden, self.qkv_bias)
        shapes |= linear_shapes({"o_proj": hidden}, queries, self.output_bias)
        if self.qk_norm_eps is not None:
            shapes |= {f"{part}_norm.weight": (self.head_dim,) for part in "qk"}
        return shapes

    def __call__(self, x: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        return weights.linear(self.attend(x, positions, weights), "o_proj")

    def attend(self, x: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        """All heads' outputs, [tokens, heads * head_dim]."""
        q, k, v = self.queries_keys_values(x, positions, weights)
        age = positions[:, None] - positions  # of the key, seen from the query
        hidden = (age < 0) if self.window is None else (age < 0) | (age >= self.window)
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(self.head_dim)
            outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, group])
        return torch.cat(outputs, dim=-1)

    def queries_keys_values(
        self, x: Tensor, positions: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, heads, head_dim] each; queries and keys are normed and rotated."""
        if self.fused_qkv:
            parts = weights.linear(x, "c_attn").split(x.shape[-1], dim=-1)
        else:
            parts = [weights.linear(x, f"{part}_proj") for part in "qkv"]
        q = parts[0].view(len(x), self.heads, self.head_dim)
        k = parts[1].view(len(x), self.kv_heads, self.head_dim)
        v = parts[2].view(len(x), self.kv_heads, self.head_dim)
        if self.qk_norm_eps is not None:
            q = rms_norm(q, weights["q_norm.weight"], self.qk_norm_eps)
        if self.norms_rotated_keys:
            k = rotate(k, positions, self.rope)
        if self.qk_norm_eps is not None:
            k = rms_norm(k, weights["k_norm.weight"], self.qk_norm_eps)
        if not self.norms_rotated_keys:
            k = rotate(k, positions, self.rope)
        return rotate(q, positions, self.rope), k, v
