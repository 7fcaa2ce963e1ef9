"""Checks that all numbers of a tensor are finite in the dtype that is served.

One NaN makes every answer garbage, with status 200.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def check_finite(name: str, tensor: "Tensor", dtype: "torch.dtype | None" = None) -> None:
    """Refuse a tensor with a number that is not finite, before or after a cast.

    The smallest and the largest number decide, in one pass at memory speed: a NaN becomes both.

    Args:
        name: the tensor's name, for messages.
        tensor: of any shape and dtype; integers are finite.
        dtype: the dtype that is served; None for the tensor's.

    Raises:
        CheckpointError: names the first such number and its place.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return
    if tensor.dtype.itemsize == 1:  # torch cannot compare 8-bit floats
        import torch

        tensor = tensor.to(torch.bfloat16)
    lowest, highest = tensor.aminmax()
    target = tensor.dtype if dtype is None else dtype
    if lowest.to(target).isfinite() and highest.to(target).isfinite():
        return
    wrong = ~tensor.to(target).isfinite()
    place = wrong.nonzero()[0].tolist()
    value = tensor[tuple(place)]
    at = f" at {place}" if place else ""
    if value.isfinite():
        kind = str(target).removeprefix("torch.")
        raise CheckpointError(
            f"the tensor {name} holds {value.item():g}{at}, which is beyond {kind}, the type that "
            "it is served in; serve it with --dtype bfloat16 or --dtype float32."
        )
    raise CheckpointError(
        f"the tensor {name} holds {value.item()}{at}, and {int(wrong.sum())} of its "
        f"{tensor.numel()} numbers are not finite, which makes answers garbage; copy the file "
        "again, or save the model from a step at which its weights were finite."
    )


def check_folder_is_finite(folder: Path) -> None:
    """Refuse a checkpoint folder with a number that is not finite.

    Raises:
        CheckpointError: names the tensor, or a damaged file.
    """
    from attnres_serve.checkpoints import read  # which imports torch

    for path in read.files(folder):
        for name, tensor in read.tensors(path):
            check_finite(name, tensor)
