"""Checks of quantised linear layers, by their tensors' names, shapes and types.

Methods pack numbers differently.  These checks hold for all of them: a layer has a weight, numbers
that are no floats have a scale, and layers that vLLM fuses are quantised alike.
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
_OF_THE_WEIGHT = re.compile(r"_?q?weight|_?scales|qzeros|g_idx")
_CACHE_SCALE = re.compile(
    r"(?P<stem>.+\.self_attn\.)((attn|qkv_proj)\.)?((kv|[qkv]|prob)_scale|[qkv]_zero_point)"
)
# Further tensors of methods whose packed weight needs more than a scale.
_BESIDE = {"gptq": ("scales", "qzeros"), "awq": ("scales", "qzeros")}
FOLDED = re.compile(r".+\.kv_b_proj")  # latent attention folds it into others
_WHOLE = ("I8", "F8_E4M3", "F8_E5M2")  # one element per weight


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


def check_leaf(stored_name: str, leaf: str, stored: Stored, weight: Shape) -> None:
    """Raise CheckpointError if a tensor below a linear layer is larger than the layer.

    vLLM would cut it silently.  Some methods transpose the matrix.

    Args:
        stored_name: its name in the checkpoint.
        leaf: its name within the layer.
        stored: its shape and type.
        weight: the shape of the layer's weight, unquantised.
    """
    if leaf == "weight" and stored.dtype in (*FLOATS, *_WHOLE):
        check_shape(stored_name, stored.shape, weight)
    if not (_WEIGHT.fullmatch(leaf) or _SCALE.fullmatch(leaf)) or prod(stored.shape) == 1:
        return
    orders = [weight] if leaf.startswith("weight") else [weight, weight[::-1]]
    if not any(_fits(stored.shape, order) for order in orders):
        raise CheckpointError(
            f"the tensor {stored_name} has the shape {list(stored.shape)}, which is larger than "
            f"the weight that it belongs to, {list(weight)} by config.json; the configuration and "
            "the weights do not belong together."
        )


def _fits(shape: Shape, most: Shape) -> bool:
    sizes = zip(shape, most, strict=False)
    return len(shape) <= len(most) and all(size <= whole for size, whole in sizes)


def check_linear(
    stem: str, leaves: Mapping[str, Stored], stored_names: Mapping[str, str], method: Any
) -> str | None:
    """Raise CheckpointError if the weight of a linear layer cannot be read.

    Args:
        stem: the layer's house name.
        leaves: its tensors by their names within it.
        stored_names: their names in the checkpoint.
        method: ``quant_method`` of the quantisation.

    Returns:
        The leaf that is the weight; None without one.
    """
    held = [leaf for leaf in leaves if _WEIGHT.fullmatch(leaf)]
    if len(held) > 1:
        raise CheckpointError(same_tensor(stored_names[held[0]], stored_names[held[1]]))
    if not held:
        return None
    (weight,) = held
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
        missing = [leaf for leaf in _BESIDE.get(method, ()) if leaf not in leaves] or missing
    if missing:
        raise CheckpointError(
            f"the tensor {stored_names[weight]} holds {dtype}, and the checkpoint lacks "
            f"{missing[0]} of {stem}, without which its numbers mean nothing; save the model "
            "with all that the quantisation wrote."
        )
    return weight


def check_fused(
    layers: Mapping[str, Mapping[str, Stored]], fused: Sequence[tuple[str, ...]]
) -> None:
    """Raise CheckpointError if layers that vLLM fuses are quantised in different ways.

    vLLM would treat all of them like one.

    Args:
        layers: the tensors of every linear layer, as ``check_linear`` has them.
        fused: the names of layers that vLLM fuses.
    """
    for stem in layers:
        prefix, _, first_part = stem.rpartition(".")
        group = next((group for group in fused if group[0] == first_part), ())
        parts = [name for part in group if (name := f"{prefix}.{part}") in layers]
        for first, second in pairwise(parts):
            if _manner(layers[first]) != _manner(layers[second]):
                raise CheckpointError(
                    f"{first} and {second} (in house names), which are one layer in vLLM, are "
                    "quantised in different ways; quantise both in the same way, or neither."
                )


def check_experts(layers: Mapping[str, Mapping[str, Stored]]) -> None:
    """Raise CheckpointError if experts of a layer are quantised in different ways.

    vLLM packs all of them into two tensors, in the way of the first expert.

    Args:
        layers: the tensors of every linear layer, as ``check_linear`` has them.
    """
    first: dict[str, str] = {}
    for stem, leaves in layers.items():
        if mixture := experts.mixture_of_one(stem):
            other = first.setdefault(mixture, stem)
            if _manner(leaves) != _manner(layers[other]):
                raise CheckpointError(
                    f"{other} and {stem} (in house names), which are one layer in vLLM, are "
                    "quantised in different ways; quantise all experts of a layer in the same way, "
                    "or none."
                )


def first_int8(stored: Mapping[str, Stored]) -> str | None:
    """The house name of the first weight of 8-bit integers; None without one."""
    whole = (name for name, tensor in stored.items() if tensor.dtype == "I8" and is_weight(name))
    return next(whole, None)


def first_quantised(stored: Mapping[str, Stored], kind: re.Pattern[str]) -> str | None:
    """The house name of the first weight without floats; None without one.

    Args:
        stored: shape and type of every tensor by house names.
        kind: matches the names of the layers to check.
    """
    return next(
        (
            name
            for name, tensor in stored.items()
            if is_weight(name)
            and tensor.dtype not in FLOATS
            and kind.fullmatch(name.rpartition(".")[0])
        ),
        None,
    )


def _manner(leaves: Mapping[str, Stored]) -> set[tuple[str, str]]:
    return {
        (leaf, "float" if tensor.dtype in FLOATS else tensor.dtype)
        for leaf, tensor in leaves.items()
        if _OF_THE_WEIGHT.match(leaf)
    }


def check_entries(quantisation: Mapping[str, Any], modules: Mapping[str, str]) -> None:
    """Raise CheckpointError if a quantisation names layers differently than vLLM.

    vLLM compares ``ignore``, ``targets`` and their like with the family's names: whole, as
    parts, as patterns.  An entry is right if it means the same layers by either name.

    Args:
        quantisation: the ``quantization_config``.
        modules: the checkpoint's names of linear layers, by their house names.
    """
    renamed = [
        (stored_name, house_name)
        for house_name, stored_name in modules.items()
        if stored_name != house_name
    ]
    for entry in _entries(quantisation) if renamed else ():
        for stored_name, house_name in renamed:
            if _matches(entry, stored_name) != _matches(entry, house_name):
                raise CheckpointError(
                    f"quantization_config has the entry {entry!r}, which fits only one of "
                    f"{stored_name} and {house_name}, the checkpoint's and vLLM's names of one "
                    "layer; convert the model to the house format before it is quantised, or "
                    "quantise it by entries that fit both names, such as the class Linear."
                )


def _entries(value: Any) -> Iterator[str]:
    """Possible names of layers in a JSON value: strings in lists, and others with dots or stars."""
    if isinstance(value, Mapping):
        yield from (key for key in value if isinstance(key, str) and re.search("[.*]", key))
        value = [v for v in value.values() if not isinstance(v, str) or re.search("[.*]", v)]
    for item in value if isinstance(value, list) else ():
        yield from (item,) if isinstance(item, str) else _entries(item)


def _matches(entry: str, name: str) -> tuple[bool, ...]:
    """Whether an entry matches a layer, for each way of matching in vLLM's methods."""
    try:
        pattern = bool(
            re.match(entry.removeprefix("re:").removeprefix("+:").removeprefix("-:"), name)
        )
    except re.error:
        pattern = False
    return entry == name, entry in name, pattern, fnmatchcase(name, entry)
