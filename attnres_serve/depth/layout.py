"""The layout of a decoder: its sublayers in the order in which they run, and the norms before them.

Most decoders have an attention and an MLP in every layer.  A layout can also describe layers with
one sublayer or three, and other names of norms and kinds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnres_serve.errors import CheckpointError

MAX_LAYERS = 10_000  # more than any model has; a damaged config must not fill the memory
ONE = "mixer"  # kind of the only sublayer of a layer, whatever it computes
FINAL = "final"  # kind of the site before the head
# Kind of every sublayer of a layer, and the name of the norm before it.
COMMON = (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm"))
_WORDS = {"mlp": "MLP"}


@dataclass(frozen=True)
class Sublayer:
    """One sublayer.

    Attributes:
        layer: its layer, counted from 0.
        kind: ``attention``, ``mlp`` or another name; unique within its layer.
        norm: path of the norm before it, relative to the decoder, for example
            ``layers.3.input_layernorm``.
    """

    layer: int
    kind: str
    norm: str


@dataclass(frozen=True)
class Layout:
    """All sublayers of a decoder.

    Attributes:
        sublayers: in the order in which they run.
        final_norm: path of the norm before the head, relative to the decoder.

    Raises:
        ValueError: a layer has two sublayers of one kind, whose tensors would have the same names.
    """

    sublayers: tuple[Sublayer, ...]
    final_norm: str = "norm"

    def __post_init__(self) -> None:
        if len(self._places) != self.num_sublayers:
            raise ValueError("a layer has two sublayers of one kind")

    @classmethod
    def of(
        cls, num_layers: Any, parts: Sequence[tuple[str, str]] = COMMON, final_norm: str = "norm"
    ) -> "Layout":
        """The layout of a decoder with equal layers.

        Args:
            num_layers: ``num_hidden_layers`` of a config.json.
            parts: kind of every sublayer of a layer, and the name of the norm before it.
            final_norm: path of the norm before the head.

        Raises:
            CheckpointError: no model has such a number of layers.
        """
        if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
            raise CheckpointError(
                f"num_hidden_layers is {num_layers!r}; expected a whole number from 1 to "
                f"{MAX_LAYERS}."
            )
        return cls(
            tuple(
                Sublayer(layer, kind, f"layers.{layer}.{norm}")
                for layer in range(num_layers)
                for kind, norm in parts
            ),
            final_norm,
        )

    @property
    def num_sublayers(self) -> int:
        return len(self.sublayers)

    @property
    def num_layers(self) -> int:
        return self.sublayers[-1].layer + 1

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its sublayers."""
        return frozenset(sublayer.kind for sublayer in self.sublayers)

    @cached_property
    def layer_starts(self) -> tuple[int, ...]:
        """The first sublayer of every layer."""
        layers = [sublayer.layer for sublayer in self.sublayers]
        return tuple(i for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1])

    @cached_property
    def _places(self) -> dict[tuple[int, str], int]:
        return {(one.layer, one.kind): index for index, one in enumerate(self.sublayers)}

    def find(self, layer: int, kind: str) -> int | None:
        """The number of the sublayer of this layer and kind, or None."""
        return self._places.get((layer, kind))

    def site_name(self, index: int) -> str:
        """The readable name of the site before sublayer ``index``, or of the final site."""
        if index == self.num_sublayers:
            return site_name(FINAL, None)
        return site_name(self.sublayers[index].kind, self.sublayers[index].layer)


def site_name(kind: str, layer: int | None) -> str:
    """The readable name of a site, for example ``the attention of layer 3``."""
    return "the final norm" if layer is None else f"the {_WORDS.get(kind, kind)} of layer {layer}"
