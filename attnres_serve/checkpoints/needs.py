"""What a server needs of a checkpoint besides its tensors, told by its files and config.json."""

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

# Files of which one is enough for a tokenizer of one kind or another.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model*", "tekken.json", "*.tiktoken", "tiktoken.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece*.model", "tokenization_*.py"),
)
WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # tokens are bytes
UNSTATED = 2048  # tokens that vLLM takes for the context of a recurrent model that states none
# Flags and variables with which vLLM takes more tokens than config.json states, or fewer.
OTHER_CONTEXT = ("hf_overrides", "disable_sliding_window")
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def facts(folder: Path) -> dict[str, Any]:
    """What is read as the tokenizer, and whether there is a chat template.

    ``tokenizer`` is the name of its file, None without one; ``tokenizer_read`` says how it is read
    and how that was known, and is empty where the file's name says all.
    """
    file, read = tokenizer(folder), ""
    with suppress(CheckpointError):  # what `check` refuses
        read = tokenizer_class.reading(folder).why if file else ""
    return {
        "tokenizer": file,
        "tokenizer_read": read,
        "chat_template": has_chat_template(folder),
    }


def check(
    name: str, parsed: ParsedConfig, folder: Path | None, arguments: Arguments | None = None
) -> None:
    """Refuse a checkpoint that vLLM's server would fail at, after the seconds of its start.

    Args:
        name: what the checkpoint is called.
        parsed: what the resolver made of it.
        folder: where its files are; None for a model id, whose tokenizer is not looked for.
        arguments: of vLLM's server.

    Raises:
        CheckpointError: there is no tokenizer, it is damaged, it would be read otherwise than the
            model was trained, the model has no rows for its tokens or for those that end an answer,
            or this device computes no heads of that size.
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
    """Refuse heads that vLLM's attention on this device does not compute.

    Raises:
        CheckpointError: their size is none of those that it has a kernel for.
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
    """Refuse quantised layers that vLLM does not compute on this device.

    Args:
        name: what the checkpoint is called.
        index: its tensors; None where they cannot be had.

    Raises:
        CheckpointError: there are some.
    """
    if index is None or not device.is_cpu():
        return
    found = quantized.first_quantised(index.stored, quantized.FOLDED)
    if found is not None:
        raise CheckpointError(
            f"{name} has a quantised kv_b_proj ({found} in house names), which vLLM was not shown "
            "to fold rightly on a CPU; serve it on a GPU, or quantise the model with kv_b_proj in "
            "`ignore`."
        )
    found = quantized.first_quantised(index.stored, experts.ONE)
    if found is not None and source.lacks_quantized_experts():
        raise CheckpointError(
            f"{name} has quantised experts ({found} in house names), and vLLM computes those on "
            "this CPU only with AMX or zentorch; serve it on such a CPU or on a GPU, or quantise "
            "the model with its experts in `ignore`."
        )
    found = quantized.first_int8(index.stored)
    if found is not None and source.lacks_int8():
        raise CheckpointError(
            f"{name} has INT8 weights ({found} in house names), whose products vLLM computes "
            "wrongly on this CPU, which has no dot products of 8-bit integers (avx512_vnni, "
            "avx_vnni or amx_int8 in /proc/cpuinfo); serve it on a CPU that has them, or on a GPU."
        )


def check_context(name: str, parsed: ParsedConfig, arguments: Arguments) -> None:
    """Refuse a ``--max-model-len`` that vLLM refuses.

    Raises:
        SettingError: it is longer than the model's context.
    """
    asked = arguments.max_model_len
    free = os.environ.get(LONGER, "0").strip().lower() in ("1", "true")
    config = parsed.config
    if asked is None or free or arguments.has(*OTHER_CONTEXT):
        return
    if "max_position_embeddings" not in config:
        return
    rope = _rope(config)
    # By YaRN's own numbers in vLLM 0.28, by max_position_embeddings in later ones: the longer.
    stretched = rope.get("original_max_position_embeddings", 0) * (rope.get("factor") or 1)
    longest = int(max(context(config), config.get("model_max_length") or 0, stretched))
    if asked > longest:
        raise SettingError(
            f"--max-model-len is {asked}, and {name} has a context of {longest} tokens; give at "
            f"most that, or set {LONGER}=1 to serve positions that it was not trained for."
        )


def tokenizer(folder: Path) -> str | None:
    """The name of a file by which a folder has a tokenizer, None if there is none."""
    for pattern in TOKENIZERS:
        if found := sorted(folder.glob(pattern)):
            return found[0].name
    bytewise = _read(folder / "tokenizer_config.json").get("tokenizer_class") in WITHOUT_FILES
    return "tokenizer_config.json" if bytewise else None


def has_chat_template(folder: Path) -> bool:
    """Whether vLLM finds out by itself how a chat becomes a prompt."""
    files = ("chat_template.jinja", "chat_template.json")
    inside = _read(folder / "tokenizer_config.json").get("chat_template")
    return bool(inside) or any((folder / name).is_file() for name in files)


def context(config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence, as vLLM counts them.

    Args:
        config: that of the family.
    """
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type"))
    # Of these, max_position_embeddings is what comes out of the factor.
    stretched = kind in ("llama3", "yarn") or "gemma3" in config.get("model_type", "")
    factor = 1 if stretched else rope.get("factor") or 1
    return int(config.get("max_position_embeddings", UNSTATED) * factor)


def command(name: str) -> str:
    """The command that serves a checkpoint."""
    return f"attnres-serve serve {shlex.quote(name)}"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where it cannot be had: whoever needs it says so."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
