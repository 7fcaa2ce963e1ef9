"""Tensors as transformers holds them in memory, for a ``state_dict`` that was saved as it was.

transformers 5 packs the experts of a layer into one tensor and renames some other tensors.
``save_pretrained`` reverts both; the same conversions are used here.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attnres_serve.families.family import HEAD, Held, Shape

if TYPE_CHECKING:
    from torch import Tensor


def held(model: Any, needed: Mapping[str, Shape]) -> dict[str, Held]:
    """The tensors of a model with another form on disk, by their names in memory.

    Empty unless all tensors together are exactly what a checkpoint needs.

    Args:
        model: a transformers model on any device, with conversions in ``_weight_conversions``.
        needed: shapes of a checkpoint's tensors by their names.
    """
    in_memory: dict[str, Held] = {}
    whole: dict[str, Shape] = {}
    for name, tensor in model.state_dict().items():
        if name in needed:
            whole[name] = tuple(tensor.shape)
        elif name != HEAD:  # which a tied model has beside its embedding
            parts = {part: tuple(one.shape) for part, one in _on_disk(model, name, tensor).items()}
            in_memory[name] = Held(tuple(tensor.shape), parts, _unpacking(model, name))
            whole |= parts
    return in_memory if whole == needed else {}


def _unpacking(model: Any, name: str) -> Callable[["Tensor"], Mapping[str, "Tensor"]]:
    return lambda tensor: _on_disk(model, name, tensor)


def _on_disk(model: Any, name: str, tensor: "Tensor") -> dict[str, "Tensor"]:
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return tensors
