"""SwiGLU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnres_serve.verify.oracle.sublayers.sublayer import Shape, Sublayer, Weights, linear_shapes


@dataclass(frozen=True)
class MLP(Sublayer):
    """SwiGLU: down_proj of silu(gate_proj x) * up_proj x."""

    intermediate: int
    bias: bool = False

    def shapes(self, hidden: int) -> dict[str, Shape]:
        inner = {"gate_proj": self.intermediate, "up_proj": self.intermediate}
        shapes = linear_shapes(inner, hidden, self.bias)
        return shapes | linear_shapes({"down_proj": hidden}, self.intermediate, self.bias)

    def __call__(self, x: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        gate, up = weights.linear(x, "gate_proj"), weights.linear(x, "up_proj")
        return weights.linear(gate / (1 + torch.exp(-gate)) * up, "down_proj")
