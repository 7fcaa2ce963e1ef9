"""Checks of what a server needs of a checkpoint besides its tensors, from files and config.json."""

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints import quantized, token_ids, tokenizer_class
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.compat import device, source
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES, experts, latent
from attnres_serve.formats.parsed_config import ParsedConfig

# Files of tokenizers; each kind of tokenizer has one of them.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model*", "tekken.json", "*.tiktoken", "tiktoken.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece*.model", "tokenization_*.py"),
)
WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # tokens are bytes
UNSTATED = 2048  # vLLM's context for a recurrent model that states none
# Flags and variables that change the context that config.json states.
OTHER_CONTEXT = ("hf_overrides", "disable_sliding_window")
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def facts(folder: Path) -> dict[str, Any]:
    """Facts about the tokenizer and the chat template.

    ``tokenizer`` is the name of its file, None without one; ``tokenizer_read`` says how it is read
    and why, and is empty if the file's name is enough.
    """
    file, read = tokenizer(folder), ""
    with suppress(CheckpointError):  # `check` raises it
        read = tokenizer_class.reading(folder).why if file else ""
    return {
        "tokenizer": file,
        "tokenizer_read": read,
        "chat_template": has_chat_template(folder),
    }


def check(
    name: str, parsed: ParsedConfig, folder: Path | None, arguments: Arguments | None = None
) -> None:
    """Refuse a checkpoint on which vLLM's server would fail only after its start.

    Args:
        name: the checkpoint's name, for messages.
        parsed: the parsed config.json.
        folder: its folder; None for a model id, whose tokenizer is not checked.
        arguments: of vLLM's server.

    Raises:
        CheckpointError: the tokenizer is missing, damaged or would be read differently than in
            training; the model has no rows for its tokens or the end-of-sequence tokens; or this
            device cannot compute heads of that size.
        SettingError: ``--max-model-len`` is longer than the model's context.
    """
    arguments = arguments or Arguments()
    check_heads(name, parsed)
    check_context(name, parsed, arguments)
    rows = parsed.config["vocab_size"]
    if folder is not None:
        token_ids.check_end(folder, rows)
    place = folder if arguments.tokenizer is None else Path(arguments.tokenizer)
    another_kind = arguments.tokenizer_mode not in source.TOKENIZER_MODES
    if another_kind or arguments.skip_tokenizer_init:
        return
    if place is None or not place.is_dir():
        return
    if tokenizer(place) is None:
        raise CheckpointError(
            f"{place} has no tokenizer, for example tokenizer.json; copy its files beside the "
            "weights, name another folder with --tokenizer, or serve token ids alone with "
            "--skip-tokenizer-init."
        )
    tokenizer_class.reading(place, arguments.trust_remote_code)
    token_ids.check(place, rows)


def check_heads(name: str, parsed: ParsedConfig) -> None:
    """Refuse heads that vLLM's attention on this device cannot compute.

    Raises:
        CheckpointError: vLLM has no kernel for their size.
    """
    family, config = FAMILIES[parsed.family], parsed.config
    if family.is_latent:
        _check_row(name, config)
        return
    size, sizes = family.head_size(config), source.head_sizes()
    if size is not None and sizes and size not in sizes:
        raise CheckpointError(
            f"{name} has heads of the size {size}, and vLLM's attention on CPU computes those of "
            f"{', '.join(map(str, sizes))}; serve it on a GPU."
        )


def _check_row(name: str, config: Mapping[str, Any]) -> None:
    channels, sizes = latent.head_size(config), source.latent_rows()
    if sizes and channels not in sizes:
        both = " and ".join(f"{key} {config[key]}" for key in latent.ROW)
        raise CheckpointError(
            f"{name} has latent attention with {both}, which are {channels} channels together, "
            f"and vLLM's on a GPU computes {', '.join(map(str, sizes))}; serve it on a CPU."
        )


def check_quantized(name: str, index: TensorIndex | None) -> None:
    """Refuse quantised layers that vLLM cannot compute on this device.

    Args:
        name: the checkpoint's name, for messages.
        index: its tensors; None if they are not available.

    Raises:
        CheckpointError: it has such layers.
    """
    if index is None or not device.is_cpu():
        return
    weight = quantized.first_quantised(index.stored, quantized.FOLDED)
    if weight is not None:
        raise CheckpointError(
            f"{name} has a quantised kv_b_proj ({weight} in house names), which vLLM was not shown "
            "to fold rightly on a CPU; serve it on a GPU, or quantise the model with kv_b_proj in "
            "`ignore`."
        )
    weight = quantized.first_quantised(index.stored, experts.ONE)
    if weight is not None and source.lacks_quantized_experts():
        raise CheckpointError(
            f"{name} has quantised experts ({weight} in house names), and vLLM computes those on "
            "this CPU only with AMX or zentorch; serve it on such a CPU or on a GPU, or quantise "
            "the model with its experts in `ignore`."
        )
    weight = quantized.first_int8(index.stored)
    if weight is not None and source.lacks_int8():
        raise CheckpointError(
            f"{name} has INT8 weights ({weight} in house names), whose products vLLM computes "
            "wrongly on this CPU, which has no dot products of 8-bit integers (avx512_vnni, "
            "avx_vnni or amx_int8 in /proc/cpuinfo); serve it on a CPU that has them, or on a GPU."
        )


def check_context(name: str, parsed: ParsedConfig, arguments: Arguments) -> None:
    """Refuse a ``--max-model-len`` that vLLM refuses.

    Raises:
        SettingError: it is longer than the model's context.
    """
    length = arguments.max_model_len
    free = os.environ.get(LONGER, "0").strip().lower() in ("1", "true")
    config = parsed.config
    if length is None or free or arguments.has(*OTHER_CONTEXT):
        return
    if "max_position_embeddings" not in config:
        return
    rope = _rope(config)
    # vLLM 0.28 reads YaRN's numbers, later versions max_position_embeddings: take the longer.
    stretched = rope.get("original_max_position_embeddings", 0) * (rope.get("factor") or 1)
    longest = int(max(context(config), config.get("model_max_length") or 0, stretched))
    if length > longest:
        raise SettingError(
            f"--max-model-len is {length}, and {name} has a context of {longest} tokens; give at "
            f"most that, or set {LONGER}=1 to serve positions that it was not trained for."
        )


def tokenizer(folder: Path) -> str | None:
    """The name of the tokenizer's main file in a folder, None without one."""
    for pattern in TOKENIZERS:
        if files := sorted(folder.glob(pattern)):
            return files[0].name
    bytewise = _read(folder / "tokenizer_config.json").get("tokenizer_class") in WITHOUT_FILES
    return "tokenizer_config.json" if bytewise else None


def has_chat_template(folder: Path) -> bool:
    """Whether vLLM finds a chat template in the folder."""
    files = ("chat_template.jinja", "chat_template.json")
    inside = _read(folder / "tokenizer_config.json").get("chat_template")
    return bool(inside) or any((folder / name).is_file() for name in files)


def context(config: Mapping[str, Any]) -> int:
    """The longest sequence in tokens, as vLLM computes it.

    Args:
        config: the family's config.json.
    """
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type"))
    # For these kinds, max_position_embeddings already includes the factor.
    stretched = kind in ("llama3", "yarn") or "gemma3" in config.get("model_type", "")
    factor = 1 if stretched else rope.get("factor") or 1
    return int(config.get("max_position_embeddings", UNSTATED) * factor)


def command(name: str) -> str:
    """The command that serves a checkpoint."""
    return f"attnres-serve serve {shlex.quote(name)}"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it cannot be read, which other code reports."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
