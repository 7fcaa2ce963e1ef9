"""The caches of a model and the kinds of its layers, from its tensors' names and shapes."""

import re
from collections.abc import Iterable, Mapping

from attnres_serve.families import experts
from attnres_serve.families.family import Shape

# The outputs of these projections are cached.
_CACHED = re.compile(r"\.(k_proj|v_proj|kv_a_proj_with_mqa)\.weight$")
_CONVOLUTION = re.compile(r"\.\w*conv(1d)?\.weight$")  # [channels, 1, tokens] of a recurrent layer
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def cache_elements(shapes: Mapping[str, Shape]) -> int:
    """Elements of the KV cache for a token: the rows of the cached projections."""
    rows = sum(shape[0] for name, shape in shapes.items() if _CACHED.search(name))
    for name, (fused, _) in ((n, s) for n, s in shapes.items() if n.endswith("qkv_proj.weight")):
        output = shapes[name.replace("qkv_proj", "o_proj")]
        rows += fused - output[1]  # without the queries
    return rows


def convolution_elements(shapes: Mapping[str, Shape]) -> int:
    """Elements of a sequence's state that short convolutions keep: the tokens before the newest."""
    convolutions = (shape for name, shape in shapes.items() if _CONVOLUTION.search(name))
    return sum(shape[0] * (shape[2] - 1) for shape in convolutions if len(shape) == 3)


def recurrent_layers(shapes: Mapping[str, Shape]) -> int:
    """Layers with a recurrence; each has one vector of decays."""
    return sum(name.endswith(".A_log") for name in shapes)


def cached_layers(shapes: Mapping[str, Shape]) -> set[int]:
    """The numbers of the layers with a KV cache."""
    return _layers(name for name in shapes if _CACHED.search(name))


def convolved_layers(shapes: Mapping[str, Shape]) -> set[int]:
    """The numbers of the layers that keep a state for short convolutions."""
    return _layers(name for name in shapes if _CONVOLUTION.search(name))


def expert_layers(shapes: Mapping[str, Shape]) -> set[int]:
    """The numbers of the layers with a mixture of experts."""
    return _layers(name for name, *_ in experts.counts(shapes))


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.search(name))}
