"""Attention whose output is gated, as in nanoGPT."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_serve.verify.oracle.sublayers.attention import Attention
from attnres_serve.verify.oracle.sublayers.sublayer import Shape, Weights, linear_shapes


@dataclass(frozen=True)
class GatedAttention(Attention):
    """The heads' outputs times sigmoid(attn_gate x), before o_proj.

    ``attn_gate`` has a bias if o_proj has one.
    """

    def shapes(self, hidden: int) -> dict[str, Shape]:
        gates = {"attn_gate": self.heads * self.head_dim}
        return super().shapes(hidden) | linear_shapes(gates, hidden, self.output_bias)

    def attend(self, x: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        output = super().attend(x, positions, weights)
        return output / (1 + torch.exp(-weights.linear(x, "attn_gate")))
