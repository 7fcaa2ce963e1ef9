"""The names of a mixture of experts, in house names: whoever asks for them asks here."""

import re
from collections.abc import Iterable, Mapping

from attnres_serve.families.family import Shape

# One expert's, by its number; or all those of a layer in one tensor, the experts first.
ONE = re.compile(r"(?P<mixture>.+\.experts)\.(?P<number>\d+)\.\w+")
_STACKED = re.compile(r"\.experts\.\w+$|\.block_sparse_moe\.(input|output)_linear\.weight$")
# As transformers 5 calls them in memory.
_PACKED = re.compile(r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias)?$")
_INSIDE = re.compile(r"(?P<mixture>.*\.experts)(\.|$)")
# Keys of a config.json that say how many a token sees.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")


def is_packed(name: str) -> bool:
    """Whether a tensor has all experts of a layer, as transformers holds them in memory."""
    return bool(_PACKED.search(name))


def mixture_of_one(layer: str) -> str | None:
    """The mixture that a layer of one expert is in; None for any other layer."""
    found = ONE.fullmatch(layer)
    return found and found["mixture"]


def mixture_of(layer: str) -> str | None:
    """The mixture that a layer is, or is in; None for one that has nothing to do with experts."""
    found = _INSIDE.match(layer)
    return found and found["mixture"]


def counts(shapes: Mapping[str, Shape]) -> Iterable[tuple[str, str, int]]:
    """Of each tensor of experts its name, what has as many experts as another, and how many.

    One expert's tensor tells that there are as many as its number and one.
    """
    for name, shape in shapes.items():
        if found := ONE.match(name):
            yield name, found["mixture"], int(found["number"]) + 1
        elif _STACKED.search(name):
            yield name, name, shape[0]
