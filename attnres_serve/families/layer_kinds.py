"""Layers by what they hold, from the names and shapes of a model's tensors."""

import re
from collections.abc import Iterable, Mapping

from attnres_serve.families import experts
from attnres_serve.families.family import Shape
from attnres_serve.families.footprint import CACHED, CONVOLUTION

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def cached_layers(shapes: Mapping[str, Shape]) -> set[int]:
    """The numbers of the layers with a KV cache."""
    return _layers(name for name in shapes if CACHED.search(name))


def convolved_layers(shapes: Mapping[str, Shape]) -> set[int]:
    """The numbers of the layers that keep a state for short convolutions."""
    return _layers(name for name in shapes if CONVOLUTION.search(name))


def expert_layers(shapes: Mapping[str, Shape]) -> set[int]:
    """The numbers of the layers with a mixture of experts."""
    return _layers(name for name, *_ in experts.counts(shapes))


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.search(name))}
