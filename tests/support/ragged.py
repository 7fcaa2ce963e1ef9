"""Random batches for the recurrence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

BLOCKS = 9
KINDS = ("channel", "head", "constant")  # KDA, Gated DeltaNet and lightning attention


@dataclass(frozen=True)
class Ragged:
    """The arguments of ``recurrence`` by their names."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    state: Tensor
    slots: Tensor
    starts: Tensor
    has_history: Tensor
    scale: float

    def run(self, by) -> tuple[Tensor, Tensor]:
        """What the function returns, and the state that it leaves, in float64."""
        state = self.state.clone()
        out = by(**(vars(self) | {"state": state}))
        return out.double(), state.double()

    def to(self, dtype: torch.dtype, kept: torch.dtype) -> "Ragged":
        """With activations and states of these dtypes."""
        narrow = {name: getattr(self, name).to(dtype) for name in "qkv"}
        factor = torch.float64 if dtype == torch.float64 else torch.float32
        beta = self.beta if self.beta is None else self.beta.to(factor)
        state = self.state.to(kept)
        return replace(self, **narrow, decay=self.decay.to(factor), beta=beta, state=state)

    def part(self, **changed: Tensor) -> "Ragged":
        return replace(self, **changed)


def random(
    kind: str = "channel",
    *,
    lengths: tuple[int, ...] = (1, 20, 1, 33),
    heads: int = 4,
    shared: int = 1,
    key_dim: int = 32,
    value_dim: int = 32,
    fresh: tuple[bool, ...] = (False, True, False, False),
) -> Ragged:
    """Float64, and delta rule for all kinds but the constant one.

    Args:
        kind: one of ``KINDS``.
        lengths: tokens of the sequences.
        heads: of values.
        shared: heads that share a key.
        key_dim: its size.
        value_dim: its size.
        fresh: for each sequence, whether it has no history.
    """
    made = torch.Generator().manual_seed(0)
    tokens, groups = sum(lengths), heads // shared

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    rates = {
        "channel": (tokens, heads, key_dim),
        "head": (tokens, heads, 1),
        "constant": (1, heads, 1),
    }
    return Ragged(
        q=normalize(normal(tokens, groups, key_dim), dim=-1),
        k=normalize(normal(tokens, groups, key_dim), dim=-1),
        v=normal(tokens, heads, value_dim),
        decay=torch.exp(-normal(*rates[kind]).abs()),
        beta=None if kind == "constant" else torch.sigmoid(normal(tokens, heads)),
        state=normal(BLOCKS, heads, value_dim, key_dim),
        slots=(1 + torch.randperm(BLOCKS - 1, generator=made)[: len(lengths)]).int(),
        starts=torch.tensor((0, *lengths)).cumsum(0).int(),
        has_history=~torch.tensor(fresh),
        scale=key_dim**-0.5,
    )
