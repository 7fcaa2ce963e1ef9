"""Tensors as a class of transformers holds them in memory, for a ``state_dict`` saved by itself.

transformers 5 packs the experts of a layer into one tensor and calls some others otherwise.
``save_pretrained`` reverts both, and by the same conversions such a tensor is taken apart here.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attnres_serve.families.family import HEAD, Held, Shape

if TYPE_CHECKING:
    from torch import Tensor


def held(model: Any, needed: Mapping[str, Shape]) -> dict[str, Held]:
    """The tensors of a model that have another form on disk, by their names in memory.

    None at all unless they and the others are exactly what a checkpoint needs.

    Args:
        model: of transformers, on any device, with its conversions in ``_weight_conversions``.
        needed: shapes of a checkpoint's tensors by their names.
    """
    found: dict[str, Held] = {}
    whole: dict[str, Shape] = {}
    for name, tensor in model.state_dict().items():
        if name in needed:
            whole[name] = tuple(tensor.shape)
        elif name != HEAD:  # which a tied model has beside its embedding
            parts = {part: tuple(one.shape) for part, one in _on_disk(model, name, tensor).items()}
            found[name] = Held(tuple(tensor.shape), parts, _unpacking(model, name))
            whole |= parts
    return found if whole == needed else {}


def _unpacking(model: Any, name: str) -> Callable[["Tensor"], Mapping[str, "Tensor"]]:
    return lambda tensor: _on_disk(model, name, tensor)


def _on_disk(model: Any, name: str, tensor: "Tensor") -> dict[str, "Tensor"]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found
