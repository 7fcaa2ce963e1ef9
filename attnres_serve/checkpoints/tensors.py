"""Checks of single tensors of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnres_serve.depth.layout import Layout
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Shape

if TYPE_CHECKING:
    from torch import Tensor
from attnres_serve.checkpoints.names import PARTS


@dataclass(frozen=True)
class Stored:
    """The shape and the type of a stored tensor.

    Attributes:
        shape: its shape.
        dtype: its type as safetensors calls it, for example ``BF16``.
    """

    shape: Shape
    dtype: str


FLOATS = ("F64", "F32", "F16", "BF16")


def part_shapes(part: str, hidden: int, sources: int | None) -> tuple[Shape, ...]:
    """The allowed shapes of a site's part, the usual one first.

    ``sources``: of the site, if its bias has a number for each; None for a recency bias.
    """
    shapes: dict[str, tuple[Shape, ...]] = {
        "proj": ((1, hidden), (hidden,)),
        "norm": ((hidden,),),
        "bias": ((), (1,)) if sources is None else ((sources,),),
    }
    return shapes[part]


def check_part(
    name: str, stored: Stored, site: int, part: str, layout: Layout, allowed: tuple[Shape, ...]
) -> None:
    """Raise CheckpointError if an AttnRes tensor has a wrong shape or type for its part."""
    shape = stored.shape
    if tuple(shape) not in allowed:
        raise CheckpointError(
            f"{name}, the {PARTS[part]} of {layout.site_name(site)}, has the shape "
            f"{list(shape)}; expected {list(allowed[0])}."
        )
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{name}, the {PARTS[part]} of {layout.site_name(site)}, holds {stored.dtype}; "
            f"expected {', '.join(FLOATS)}: queries and key norms are not quantised."
        )
    if part == "bias" and allowed[0] and stored.dtype != "F32":
        raise CheckpointError(
            f"{name}, the {PARTS[part]} of {layout.site_name(site)}, holds {stored.dtype}; "
            "expected F32, as the number of a source that is not read is beyond smaller types."
        )


def check_tied(stored: Mapping[str, "Tensor"]) -> None:
    """Raise CheckpointError if a head tied to the embedding is stored with other values.

    Args:
        stored: the embedding and the head, or only the stored one.
    """
    if len(stored) < 2:
        return
    import torch

    embedding, head = stored.values()
    same_kind = embedding.dtype == head.dtype and embedding.shape == head.shape
    if not (same_kind and torch.equal(_bits(embedding), _bits(head))):
        raise CheckpointError(
            "config.json ties the head to the embedding (tie_word_embeddings), but the checkpoint "
            "holds a head of its own with other values (lm_head.weight in house names); set "
            "tie_word_embeddings to false if it was trained untied, or remove the tensor."
        )


def _bits(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def check_dtype(name: str, dtype: str) -> None:
    """Raise CheckpointError for a tensor that is quantised in an unknown way.

    A quantization_config describes linear layers only, no norms and biases.

    Args:
        name: its name.
        dtype: its type as safetensors calls it.
    """
    if dtype not in FLOATS:
        raise CheckpointError(
            f"the tensor {name} holds {dtype}; expected {', '.join(FLOATS)}, as "
            "no quantization_config says how to read it otherwise."
        )


def check_shape(name: str, shape: Shape, expected: Shape) -> None:
    """Raise CheckpointError if the shape of a tensor contradicts its configuration."""
    if tuple(shape) != tuple(expected):
        raise CheckpointError(
            f"the tensor {name} has the shape {list(shape)}, but config.json makes it "
            f"{list(expected)}; the configuration and the weights do not belong together."
        )
