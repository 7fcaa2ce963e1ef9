"""Checks whether a checkpoint has what a server needs besides tensors, by files and config.json."""

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

# Patterns of the main file of a tokenizer; every kind of tokenizer has one that matches.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model*", "tekken.json", "*.tiktoken", "tiktoken.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece*.model", "tokenization_*.py"),
)
# Classes whose tokens are bytes, so that they have no such file.
FILELESS_CLASSES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
DEFAULT_CONTEXT = 2048  # vLLM's context for a recurrent model that states none
# Flags that change the context that config.json states.
CONTEXT_FLAGS = ("hf_overrides", "disable_sliding_window")
# The environment variable that permits a longer context.
ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def tokenizer_facts(folder: Path) -> dict[str, Any]:
    """Facts about the tokenizer and the chat template, for ``attnres-serve check``.

    ``tokenizer`` is the name of the tokenizer's file; None if there is none.  ``tokenizer_read``
    says how the tokenizer is read and why; it is empty if the file's name says enough.
    """
    file_name, how_read = tokenizer_file(folder), ""
    with suppress(CheckpointError):  # `check` raises it
        how_read = tokenizer_class.reading(folder).why if file_name else ""
    return {
        "tokenizer": file_name,
        "tokenizer_read": how_read,
        "chat_template": has_chat_template(folder),
    }


def check(
    name: str, parsed: ParsedConfig, folder: Path | None, arguments: Arguments | None = None
) -> None:
    """Refuse a checkpoint on which vLLM's server would fail only after its start.

    Args:
        name: the checkpoint's name, for messages.
        parsed: the parsed config.json.
        folder: its folder; None for a model id, for which the tokenizer is not checked.
        arguments: the arguments of vLLM's server.

    Raises:
        CheckpointError: the tokenizer is missing, damaged or would be read differently than in
            training; the embedding lacks rows for some of its tokens or for an end-of-sequence
            token; or this device cannot compute heads of the model's size.
        SettingError: ``--max-model-len`` is longer than the model's context.
    """
    arguments = arguments or Arguments()
    check_heads(name, parsed)
    check_context(name, parsed, arguments)
    embedding_rows = parsed.config["vocab_size"]
    if folder is not None:
        token_ids.check_end(folder, embedding_rows)
    tokenizer_folder = folder if arguments.tokenizer is None else Path(arguments.tokenizer)
    has_other_reader = arguments.tokenizer_mode not in source.TOKENIZER_MODES
    if has_other_reader or arguments.skip_tokenizer_init:
        return
    if tokenizer_folder is None or not tokenizer_folder.is_dir():
        return
    if tokenizer_file(tokenizer_folder) is None:
        raise CheckpointError(
            f"{tokenizer_folder} has no tokenizer, for example tokenizer.json; copy its files "
            "beside the weights, name another folder with --tokenizer, or serve token ids alone "
            "with --skip-tokenizer-init."
        )
    tokenizer_class.reading(tokenizer_folder, arguments.trust_remote_code)
    token_ids.check(tokenizer_folder, embedding_rows)


def check_heads(name: str, parsed: ParsedConfig) -> None:
    """Refuse heads that vLLM's attention on this device cannot compute.

    Raises:
        CheckpointError: vLLM has no kernel for their size.
    """
    family, config = FAMILIES[parsed.family], parsed.config
    if family.is_latent:
        _check_latent_channels(name, config)
        return
    size, sizes = family.head_size(config), source.head_sizes()
    if size is not None and sizes and size not in sizes:
        raise CheckpointError(
            f"{name} has heads of the size {size}, and vLLM's attention on CPU computes those of "
            f"{', '.join(map(str, sizes))}; serve it on a GPU."
        )


def _check_latent_channels(name: str, config: Mapping[str, Any]) -> None:
    """Refuse latent attention whose cached row per token has an unsupported number of channels."""
    channels, sizes = latent.head_size(config), source.latent_rows()
    if sizes and channels not in sizes:
        stated_channels = " and ".join(f"{key} {config[key]}" for key in latent.ROW)
        raise CheckpointError(
            f"{name} has latent attention with {stated_channels}, which are {channels} channels "
            f"together, and vLLM's on a GPU computes {', '.join(map(str, sizes))}; serve it on a "
            "CPU."
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
    weight = quantized.first_quantised(index.stored, quantized.KV_B_PROJ)
    if weight is not None:
        raise CheckpointError(
            f"{name} has a quantised kv_b_proj ({weight} in house names), which vLLM was not shown "
            "to fold rightly on a CPU; serve it on a GPU, or quantise the model with kv_b_proj in "
            "`ignore`."
        )
    weight = quantized.first_quantised(index.stored, experts.ONE_EXPERT)
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
    allows_longer = os.environ.get(ALLOW_LONGER, "0").strip().lower() in ("1", "true")
    config = parsed.config
    if length is None or allows_longer or arguments.has(*CONTEXT_FLAGS):
        return
    if "max_position_embeddings" not in config:
        return
    rope = _rope_options(config)
    # For YaRN, vLLM 0.28 computes the context from these two numbers, and later versions read
    # max_position_embeddings.  The longer one is allowed.
    yarn_context = rope.get("original_max_position_embeddings", 0) * (rope.get("factor") or 1)
    longest = int(max(context(config), config.get("model_max_length") or 0, yarn_context))
    if length > longest:
        raise SettingError(
            f"--max-model-len is {length}, and {name} has a context of {longest} tokens; give at "
            f"most that, or set {ALLOW_LONGER}=1 to serve positions that it was not trained for."
        )


def tokenizer_file(folder: Path) -> str | None:
    """The name of the tokenizer's main file in a folder; None if there is none."""
    for pattern in TOKENIZER_FILES:
        if files := sorted(folder.glob(pattern)):
            return files[0].name
    stated_class = _json_object(folder / "tokenizer_config.json").get("tokenizer_class")
    return "tokenizer_config.json" if stated_class in FILELESS_CLASSES else None


def has_chat_template(folder: Path) -> bool:
    """Whether vLLM finds a chat template in the folder."""
    files = ("chat_template.jinja", "chat_template.json")
    template = _json_object(folder / "tokenizer_config.json").get("chat_template")
    return bool(template) or any((folder / name).is_file() for name in files)


def context(config: Mapping[str, Any]) -> int:
    """The longest sequence in tokens, as vLLM computes it.

    Args:
        config: a config.json in the form of the model's family.
    """
    rope = _rope_options(config)
    kind = rope.get("rope_type", rope.get("type"))
    # With these kinds, max_position_embeddings already includes the factor.
    includes_factor = kind in ("llama3", "yarn") or "gemma3" in config.get("model_type", "")
    factor = 1 if includes_factor else rope.get("factor") or 1
    return int(config.get("max_position_embeddings", DEFAULT_CONTEXT) * factor)


def serve_command(name: str) -> str:
    """The command that serves a checkpoint."""
    return f"attnres-serve serve {shlex.quote(name)}"


def _rope_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that scale the rotary embedding; empty if it is not scaled."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty for an unreadable file, which other checks report."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
