"""Tensor names of a mixture of experts, in our format; every room reads them here."""

import re
from collections.abc import Iterable, Mapping

from attnres_serve.families.family import Shape

# One expert's tensor, by its number; or one tensor of all experts of a layer, experts first.
ONE_EXPERT = re.compile(r"(?P<mixture>.+\.experts)\.(?P<number>\d+)\.\w+")
_STACKED = re.compile(r"\.experts\.\w+$|\.block_sparse_moe\.(input|output)_linear\.weight$")
# As transformers 5 calls them in memory.
_PACKED = re.compile(r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias)?$")
_INSIDE = re.compile(r"(?P<mixture>.*\.experts)(\.|$)")
# Keys of config.json for the number of experts that a token sees.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")


def is_packed(name: str) -> bool:
    """Whether a tensor has all experts of a layer, as transformers holds them in memory."""
    return bool(_PACKED.search(name))


def mixture_of_one(layer: str) -> str | None:
    """The mixture around a layer of one expert; None for any other layer."""
    match = ONE_EXPERT.fullmatch(layer)
    return match and match["mixture"]


def mixture_of(layer: str) -> str | None:
    """The mixture that a layer is, or is in; None for a layer without experts."""
    match = _INSIDE.match(layer)
    return match and match["mixture"]


def counts(shapes: Mapping[str, Shape]) -> Iterable[tuple[str, str, int]]:
    """The name, the mixture and the least number of experts of each tensor of experts.

    The tensor of expert n shows that there are n + 1 at least.
    """
    for name, shape in shapes.items():
        if expert := ONE_EXPERT.match(name):
            yield name, expert["mixture"], int(expert["number"]) + 1
        elif _STACKED.search(name):
            yield name, name, shape[0]
