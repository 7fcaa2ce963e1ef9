"""The interface of sublayers, and their access to weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """The tensors of one sublayer of one layer, by Hugging Face's names within it.

    Attributes:
        tensors: the checkpoint's tensors, in float64.
        name_of: the checkpoint's name for a name within the sublayer, such as ``q_proj.weight``.
    """

    tensors: Mapping[str, Tensor]
    name_of: Callable[[str], str]

    def __getitem__(self, leaf: str) -> Tensor:
        return self.tensors[self.name_of(leaf)]

    def linear(self, x: Tensor, leaf: str) -> Tensor:
        """``x`` [tokens, in] -> [tokens, out] through ``leaf``, with its bias if it has one."""
        y = x @ self[f"{leaf}.weight"].T
        return y + self[f"{leaf}.bias"] if self.name_of(f"{leaf}.bias") in self.tensors else y


class Sublayer(ABC):
    """One kind of sublayer with its sizes. All layers of the kind share one object."""

    @abstractmethod
    def shapes(self, hidden: int) -> dict[str, Shape]:
        """Every tensor of one layer, by its name within the sublayer."""

    @abstractmethod
    def __call__(self, x: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        """The output [tokens, hidden] for one whole sequence, in float64.

        Args:
            x: [tokens, hidden], float64: the residual stream after the norm of the sublayer.
            positions: [tokens], int64, rising.
            weights: the weights of one layer.
        """


def linear_shapes(outputs: Mapping[str, int], inputs: int, bias: bool) -> dict[str, Shape]:
    """Weights [outputs, inputs] of linears by name, and biases [outputs]."""
    shapes: dict[str, Shape] = {f"{leaf}.weight": (rows, inputs) for leaf, rows in outputs.items()}
    if bias:
        shapes |= {f"{leaf}.bias": (rows,) for leaf, rows in outputs.items()}
    return shapes
