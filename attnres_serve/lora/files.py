"""Checks that vLLM would apply all of a LoRA adapter, as saved by PEFT.

vLLM skips tables of tokens that PEFT saved beside an adapter, scales by the rank that
adapter_config.json states even if the tensors have another, pads small tensors with zeros, and does
not check values.  With these checks every tensor of the file is used, or refused by name.
"""

import json
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from attnres_serve.families.experts import mixture_of

if TYPE_CHECKING:
    from torch import Tensor, dtype

Shape = tuple[int, ...]
HasTable = Callable[[str, "Tensor"], bool]  # see ``Model.has_table``
CONFIG_FILE = "adapter_config.json"
# The files of tensors that vLLM looks for, in its order.
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Keys of adapter_config.json that change what an adapter computes, and that vLLM ignores.
UNSUPPORTED = {
    "modules_to_save": "whole layers that were trained beside it",
    "trainable_token_indices": "rows of the embedding that were trained beside it",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "layer_replication": "layers that are replicated",
}
# Values of init_lora_weights that set the adapter alone; others change the model's weights as well.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
MERGE_ADVICE = "merge it into the weights"
_PREFIX = "base_model.model."
_MATRIX = re.compile(
    r"(?P<layer>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))"
)
_TABLE = re.compile(r"(?:.*\.)?(?P<leaf>embed_tokens|lm_head)\.base_layer\.weight")
_DEPTH_ATTENTION = re.compile(r"_res_(proj|norm)$")


@dataclass(frozen=True)
class Model:
    """The facts about a served model that decide which adapters fit.

    Attributes:
        weight_shapes: the shapes of the model's weights by their names; empty if unknown.
        max_rank: the value of --max-lora-rank.
        has_table: whether the model's table for a name, ``embed_tokens`` or ``lm_head``, equals a
            table in an adapter's file.
        dtype: the type to which vLLM converts the adapter; None if unknown.
    """

    weight_shapes: Mapping[str, Shape]
    max_rank: int
    has_table: HasTable
    dtype: "dtype | None" = None


def problem(folder: Path, model: Model) -> str | None:
    """The reason why an adapter would not be applied whole; None if it would be.

    It is the end of a sentence that begins with the adapter's name.

    Args:
        folder: the folder that PEFT saved.
        model: the facts about the served model.
    """
    try:
        config = _read_config(folder)
        _check_config(config, model.max_rank)
        _check_tensors(_read_tensors(folder), config, model)
    except _NotWholeError as error:
        return str(error)
    return None


class _NotWholeError(Exception):
    """The adapter would not be applied whole; holds the text that ``problem`` returns."""


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise _NotWholeError(f"has no {CONFIG_FILE} in {folder}; give the folder that PEFT saved.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise _NotWholeError(
            f"has an {CONFIG_FILE} that cannot be read as JSON ({error}); copy or save it again."
        ) from None
    if not isinstance(config, dict):
        raise _NotWholeError(f"has an {CONFIG_FILE} that is no JSON object; copy or save it again.")
    return config


def _check_config(config: Mapping[str, Any], max_rank: int) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise _NotWholeError(
            f"is of PEFT's type {kind!r}, and vLLM applies LORA alone; {MERGE_ADVICE}."
        )
    for key in ("r", "lora_alpha", "target_modules"):
        if key not in config:
            raise _NotWholeError(f"has no {key} in {CONFIG_FILE}; copy or save it again.")
    _require(_is_rank(config["r"]), "r", config["r"], "a whole number above 0")
    _require(_is_number(config["lora_alpha"]), "lora_alpha", config["lora_alpha"], "a number")
    for pattern_key, is_valid, expected in (
        ("rank_pattern", _is_rank, "whole numbers above 0"),
        ("alpha_pattern", _is_number, "numbers"),
    ):
        by_layer = config.get(pattern_key) or {}
        is_valid_object = isinstance(by_layer, dict) and all(map(is_valid, by_layer.values()))
        _require(
            is_valid_object, pattern_key, by_layer, f"an object from names of layers to {expected}"
        )
        for layer in by_layer:
            _require(_is_regex(layer), f"a key of {pattern_key}", layer, "a regular expression")
    for key, value in config.items():
        if value and key in UNSUPPORTED:
            raise _NotWholeError(
                f"has {UNSUPPORTED[key]} ({key} in {CONFIG_FILE}), which vLLM does not apply; "
                f"{MERGE_ADVICE}."
            )
        if value and key.startswith("use_") and key != "use_rslora":
            raise _NotWholeError(
                f"has {key} in {CONFIG_FILE}, of which is not known what it changes; "
                f"{MERGE_ADVICE}."
            )
    bias = config.get("bias") or "none"
    if bias != "none":
        raise _NotWholeError(
            f"has biases (bias is {bias!r} in {CONFIG_FILE}), which vLLM does not apply; "
            f"{MERGE_ADVICE}."
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise _NotWholeError(
            f"has init_lora_weights {init!r} in {CONFIG_FILE}, with which PEFT changed the weights "
            "of the model as well; save it with path_initial_model_for_weight_conversion of PEFT."
        )
    largest_rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if largest_rank > max_rank:
        raise _NotWholeError(
            f"has the rank {largest_rank} by {CONFIG_FILE}, and --max-lora-rank is {max_rank}; "
            "start the server with a larger one."
        )


def _require(is_valid: bool, key: str, value: Any, expected: str) -> None:
    if not is_valid:
        raise _NotWholeError(
            f"has {json.dumps(value)} as {key} in {CONFIG_FILE}; expected {expected}, so copy or "
            "save it again."
        )


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_regex(value: str) -> bool:
    try:
        re.compile(value)
    except re.error:
        return False
    return True


def _read_tensors(folder: Path) -> dict[str, "Tensor"]:
    path = next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise _NotWholeError(
            f"has no {WEIGHTS_FILES[0]} in {folder}; give the folder that PEFT saved."
        )
    tensors: Any
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(path)
        else:
            import torch

            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # whose text advises to run the code
        tensors = None
    except Exception as error:  # the readers raise various errors
        reason = str(error).partition("\n")[0]
        raise _NotWholeError(
            f"has a damaged or truncated {path.name} ({reason}); copy or save it again."
        ) from None
    if not _are_tensors(tensors):
        raise _NotWholeError(
            f"has an {path.name} that is damaged or holds more than tensors, so nothing in it was "
            "run; save the adapter as safetensors."
        )
    if not tensors:
        raise _NotWholeError(f"has no tensor in {path.name}; copy or save it again.")
    return tensors


def _are_tensors(content: Any) -> TypeGuard[dict[str, "Tensor"]]:
    from torch import Tensor

    return isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    )


def _check_tensors(
    tensors: Mapping[str, "Tensor"], config: Mapping[str, Any], model: Model
) -> None:
    pairs: dict[str, dict[str, Tensor]] = {}
    embeddings = set()
    for name, tensor in tensors.items():
        layer_name = name.removeprefix(_PREFIX)
        matrix, table = _MATRIX.fullmatch(layer_name), _TABLE.fullmatch(layer_name)
        if matrix:
            _check_values(layer_name, tensor, model.dtype)
            pair = pairs.setdefault(matrix["layer"], {})
            pair[matrix["linear"] or matrix["embedding"]] = tensor
            if matrix["embedding"]:
                embeddings.add(matrix["layer"])
        elif table is None:
            raise _NotWholeError(
                f"holds the tensor {layer_name}, and vLLM applies lora_A and lora_B alone; save it "
                f"without that, or {MERGE_ADVICE}."
            )
        elif not model.has_table(table["leaf"], tensor):
            raise _NotWholeError(
                f"holds {layer_name}, a table other than the model's, which vLLM would leave out; "
                "save it with save_embedding_layers=False if that was not trained, or "
                f"{MERGE_ADVICE}."
            )
    for layer, pair in pairs.items():
        _check_pair(layer, pair, config)
        _check_layer(layer, pair, layer in embeddings, model.weight_shapes)


def _check_values(name: str, tensor: "Tensor", dtype: "dtype | None") -> None:
    import torch

    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise _NotWholeError(
            f"holds {name} as {tensor.dtype}; expected float32, bfloat16 or float16, as PEFT "
            "saves it."
        )
    if not torch.isfinite(tensor).all():
        raise _NotWholeError(f"holds {name} with NaN or infinity; train or save it again.")
    if dtype is not None and not torch.isfinite(tensor.to(dtype)).all():
        raise _NotWholeError(
            f"holds {name} with numbers that are infinite in {str(dtype).removeprefix('torch.')}; "
            "serve the model with --dtype bfloat16 or float32."
        )


def _check_pair(layer: str, pair: Mapping[str, "Tensor"], config: Mapping[str, Any]) -> None:
    """Check that both matrices exist and have the rank that adapter_config.json states."""
    for matrix, counterpart in (("A", "B"), ("B", "A")):
        if matrix not in pair:
            raise _NotWholeError(
                f"holds lora_{counterpart} of {layer} without lora_{matrix}; copy or save it again."
            )
    down, up = pair["A"], pair["B"]
    if down.dim() != 2 or up.dim() != 2:
        raise _NotWholeError(
            f"has the shapes {_shapes(pair)} for {layer}; expected two matrices, so copy or save "
            "it again."
        )
    stated_rank, ranks = _stated_rank(layer, config), {down.shape[0], up.shape[1]}
    # PEFT saves the matrices of all experts of a layer as one matrix.
    is_of_experts = mixture_of(layer) and len(ranks) == 1 and min(ranks) % stated_rank == 0
    if ranks != {stated_rank} and not is_of_experts:
        raise _NotWholeError(
            f"has the rank {' and '.join(map(str, sorted(ranks)))} in its tensors of {layer}, and "
            f"{CONFIG_FILE} states {stated_rank} (r, rank_pattern); correct it, or copy or save it "
            "again."
        )


def _check_layer(
    layer: str, pair: Mapping[str, "Tensor"], is_embedding: bool, weight_shapes: Mapping[str, Shape]
) -> None:
    """Check that the model has the layer, and that its weight has the size of the matrices."""
    if _DEPTH_ATTENTION.search(layer):
        raise _NotWholeError(
            f"changes {layer}, a part of depth attention, to which vLLM applies no adapter; train "
            f"it without that layer, or {MERGE_ADVICE}."
        )
    if not weight_shapes or mixture_of(layer):
        return
    weight_shape = weight_shapes.get(f"{layer}.weight")
    if weight_shape is None:
        if layer.endswith("lm_head"):  # tied to the embedding
            return
        raise _NotWholeError(
            f"changes {layer}, which the model does not have; give the adapter of this model."
        )
    if len(weight_shape) != 2:
        raise _NotWholeError(
            f"changes {layer}, which is no matrix but {list(weight_shape)} by config.json, and "
            f"vLLM applies adapters to matrices; train it without that layer, or {MERGE_ADVICE}."
        )
    product_shape = (pair["B"].shape[0], pair["A"].shape[1])
    if tuple(weight_shape) != (product_shape[::-1] if is_embedding else product_shape):
        raise _NotWholeError(
            f"has the shapes {_shapes(pair)} for {layer}, whose weight is {list(weight_shape)} by "
            "config.json; give the adapter of this model."
        )


def _shapes(pair: Mapping[str, "Tensor"]) -> str:
    return " and ".join(str(list(pair[matrix].shape)) for matrix in "AB")


def _stated_rank(layer: str, config: Mapping[str, Any]) -> int:
    """The rank of a layer by PEFT's rule: the first pattern that matches the end of its name."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return int(rank)
    return int(config["r"])
