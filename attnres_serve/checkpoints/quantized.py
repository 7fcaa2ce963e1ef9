"""Checks of quantised linear layers, by their tensors' names, shapes and types.

Every method of quantisation packs numbers in its own way.  These checks hold for all methods: a
layer has a weight, a weight that is not stored as floats has a scale, and layers that vLLM fuses
are quantised in the same way.

The name of a layer's tensor is the layer's name, a dot and a leaf such as ``qweight``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from typing import Any

from attnres_serve.checkpoints.names import same_tensor
from attnres_serve.checkpoints.tensors import FLOATS, Stored, check_shape
from attnres_serve.errors import CheckpointError
from attnres_serve.families import experts
from attnres_serve.families.family import Shape

_WEIGHT = re.compile(r"_?q?weight(_packed|_qdata)?")
_SCALE = re.compile(r"_?(weight_)?scales?(_inv)?")
# Leaves that show how the weight is quantised.
_WEIGHT_LEAF = re.compile(r"_?q?weight|_?scales|qzeros|g_idx")
_CACHE_SCALE = re.compile(
    r"(?P<stem>.+\.self_attn\.)((attn|qkv_proj)\.)?((kv|[qkv]|prob)_scale|[qkv]_zero_point)"
)
# The leaves that a ``qweight`` needs, by method.
_NEEDED_LEAVES = {"gptq": ("scales", "qzeros"), "awq": ("scales", "qzeros")}
KV_B_PROJ = re.compile(r".+\.kv_b_proj")  # latent attention folds it into other weights
_UNPACKED = ("I8", "F8_E4M3", "F8_E5M2")  # types with one element for each number of the weight


def is_weight(name: str) -> bool:
    """Whether a tensor is a layer's weight, and not a scale or the like."""
    return _WEIGHT.fullmatch(name.rpartition(".")[2]) is not None


def is_cache_scale(name: str, needed: Mapping[str, Shape]) -> bool:
    """Whether a tensor is a scale of the 8-bit KV cache of a layer in the model."""
    match = _CACHE_SCALE.fullmatch(name)
    return match is not None and f"{match['stem']}q_proj.weight" in needed


def may_have_spare_biases(quantisation: Mapping[str, Any]) -> bool:
    """Whether exporters of this method write zero biases for layers without biases."""
    return quantisation.get("quant_method") == "gptq"


def check_leaf(stored_name: str, leaf: str, stored: Stored, weight_shape: Shape) -> None:
    """Raise CheckpointError if a tensor of a linear layer is larger than the layer's weight.

    vLLM would cut it silently.  The tensor may be transposed, as some methods store it so.

    Args:
        stored_name: the tensor's name in the checkpoint.
        leaf: the tensor's name within the layer.
        stored: the tensor's shape and type.
        weight_shape: the shape of the layer's weight before it was quantised.
    """
    if leaf == "weight" and stored.dtype in (*FLOATS, *_UNPACKED):
        check_shape(stored_name, stored.shape, weight_shape)
    if not (_WEIGHT.fullmatch(leaf) or _SCALE.fullmatch(leaf)) or prod(stored.shape) == 1:
        return
    allowed_shapes = [weight_shape]
    if not leaf.startswith("weight"):
        allowed_shapes.append(weight_shape[::-1])
    if not any(_fits(stored.shape, allowed_shape) for allowed_shape in allowed_shapes):
        raise CheckpointError(
            f"the tensor {stored_name} has the shape {list(stored.shape)}, which is larger than "
            f"the weight that it belongs to, {list(weight_shape)} by config.json; the "
            "configuration and the weights do not belong together."
        )


def _fits(shape: Shape, limit: Shape) -> bool:
    """Whether a shape has no larger dimensions than a limit, and no more of them."""
    size_pairs = zip(shape, limit, strict=False)
    return len(shape) <= len(limit) and all(size <= most for size, most in size_pairs)


def check_linear(
    layer: str, leaves: Mapping[str, Stored], stored_names: Mapping[str, str], method: Any
) -> str | None:
    """Raise CheckpointError if the weight of a linear layer cannot be read.

    Args:
        layer: the layer's house name.
        leaves: the shape and type of the layer's tensors, by leaf.
        stored_names: the names of these tensors in the checkpoint, by leaf.
        method: ``quant_method`` of the quantisation.

    Returns:
        The leaf that is the weight; None if the layer has none.
    """
    weights = [leaf for leaf in leaves if _WEIGHT.fullmatch(leaf)]
    if len(weights) > 1:
        raise CheckpointError(same_tensor(stored_names[weights[0]], stored_names[weights[1]]))
    if not weights:
        return None
    (weight,) = weights
    scales = [leaf for leaf in leaves if _SCALE.fullmatch(leaf)]
    dtype = leaves[weight].dtype
    if dtype in FLOATS and scales:
        raise CheckpointError(
            f"the tensor {stored_names[weight]} holds {dtype}, but {stored_names[scales[0]]} "
            "beside it is the scale of a quantised weight; save the model as the quantisation "
            "wrote it."
        )
    if dtype == "I8" and scales and leaves[scales[0]].dtype not in FLOATS:
        raise CheckpointError(
            f"the tensor {stored_names[scales[0]]} holds {leaves[scales[0]].dtype}; expected "
            f"{', '.join(FLOATS)}, as the scale of integers is."
        )
    missing = [] if dtype in FLOATS or scales else ["a scale (weight_scale or the like)"]
    if weight == "qweight":
        missing = [leaf for leaf in _NEEDED_LEAVES.get(method, ()) if leaf not in leaves] or missing
    if missing:
        raise CheckpointError(
            f"the tensor {stored_names[weight]} holds {dtype}, and the checkpoint lacks "
            f"{missing[0]} of {layer}, without which its numbers mean nothing; save the model "
            "with all that the quantisation wrote."
        )
    return weight


def check_fused(
    layers: Mapping[str, Mapping[str, Stored]], fused_groups: Sequence[tuple[str, ...]]
) -> None:
    """Raise CheckpointError if layers that vLLM fuses are quantised in different ways.

    vLLM would read all layers of a group in the way of one of them.

    Args:
        layers: the shape and type of the tensors of every linear layer, by house name and leaf.
        fused_groups: the names, such as ``q_proj``, of layers that vLLM fuses into one.
    """
    for layer in layers:
        prefix, _, layer_name = layer.rpartition(".")
        group = next((group for group in fused_groups if group[0] == layer_name), ())
        fused_layers = [name for part in group if (name := f"{prefix}.{part}") in layers]
        for first, second in pairwise(fused_layers):
            if _weight_types(layers[first]) != _weight_types(layers[second]):
                raise CheckpointError(
                    f"{first} and {second} (in house names), which are one layer in vLLM, are "
                    "quantised in different ways; quantise both in the same way, or neither."
                )


def check_experts(layers: Mapping[str, Mapping[str, Stored]]) -> None:
    """Raise CheckpointError if experts of a layer are quantised in different ways.

    vLLM packs all of them into two tensors, in the way of the first expert.

    Args:
        layers: the shape and type of the tensors of every linear layer, by house name and leaf.
    """
    first_of_mixture: dict[str, str] = {}
    for layer, leaves in layers.items():
        if mixture := experts.mixture_of_one(layer):
            first = first_of_mixture.setdefault(mixture, layer)
            if _weight_types(leaves) != _weight_types(layers[first]):
                raise CheckpointError(
                    f"{first} and {layer} (in house names), which are one layer in vLLM, are "
                    "quantised in different ways; quantise all experts of a layer in the same way, "
                    "or none."
                )


def first_int8(stored: Mapping[str, Stored]) -> str | None:
    """The house name of the first weight of 8-bit integers; None if there is none."""
    names = (name for name, tensor in stored.items() if tensor.dtype == "I8" and is_weight(name))
    return next(names, None)


def first_quantised(stored: Mapping[str, Stored], layer_names: re.Pattern[str]) -> str | None:
    """The house name of the first weight that is not stored as floats; None if there is none.

    Args:
        stored: the shape and type of every tensor, by house name.
        layer_names: a pattern for the house names of the layers to look at.
    """
    return next(
        (
            name
            for name, tensor in stored.items()
            if is_weight(name)
            and tensor.dtype not in FLOATS
            and layer_names.fullmatch(name.rpartition(".")[0])
        ),
        None,
    )


def _weight_types(leaves: Mapping[str, Stored]) -> set[tuple[str, str]]:
    """The leaves that show how a layer is quantised, with their types; all floats count as one."""
    return {
        (leaf, "float" if tensor.dtype in FLOATS else tensor.dtype)
        for leaf, tensor in leaves.items()
        if _WEIGHT_LEAF.match(leaf)
    }


def check_entries(quantisation: Mapping[str, Any], stored_names: Mapping[str, str]) -> None:
    """Raise CheckpointError if entries of a quantisation mean other layers to vLLM.

    vLLM compares the entries of ``ignore``, ``targets`` and similar keys with the family's names of
    layers, depending on the method as a whole name, a part of a name or a pattern.  An entry is
    right if it matches the same layers by the checkpoint's names and by the family's names.

    Args:
        quantisation: the ``quantization_config``.
        stored_names: the checkpoint's names of linear layers, by their house names.
    """
    renamed = [
        (stored_name, house_name)
        for house_name, stored_name in stored_names.items()
        if stored_name != house_name
    ]
    for entry in _layer_entries(quantisation) if renamed else ():
        for stored_name, house_name in renamed:
            if _matches(entry, stored_name) != _matches(entry, house_name):
                raise CheckpointError(
                    f"quantization_config has the entry {entry!r}, which fits only one of "
                    f"{stored_name} and {house_name}, the checkpoint's and vLLM's names of one "
                    "layer; convert the model to the house format before it is quantised, or "
                    "quantise it by entries that fit both names, such as the class Linear."
                )


def _layer_entries(value: Any) -> Iterator[str]:
    """The strings in a JSON value that may name layers.

    These are all strings in lists, and the other strings and keys that have a dot or a star.
    """
    if isinstance(value, Mapping):
        yield from (key for key in value if isinstance(key, str) and re.search("[.*]", key))
        value = [
            item for item in value.values() if not isinstance(item, str) or re.search("[.*]", item)
        ]
    for item in value if isinstance(value, list) else ():
        yield from (item,) if isinstance(item, str) else _layer_entries(item)


def _matches(entry: str, name: str) -> tuple[bool, ...]:
    """Whether an entry matches the name of a layer, in each of the ways that vLLM's methods use."""
    try:
        matches_as_regex = bool(
            re.match(entry.removeprefix("re:").removeprefix("+:").removeprefix("-:"), name)
        )
    except re.error:
        matches_as_regex = False
    return entry == name, entry in name, matches_as_regex, fnmatchcase(name, entry)
