"""Lookup of a checkpoint's name: a folder on this machine or a Hugging Face model id."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints.files import Header, read_headers
from attnres_serve.errors import CheckpointError


def looks_like_a_path(name: str) -> bool:
    """Whether a name was meant as a path even if it does not exist on disk."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name in ("", "/")


def local_path(name: str) -> Path | None:
    """The path for a name, which need not exist; None for a model id.

    Raises:
        CheckpointError: no file can have the name.
    """
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{name} cannot be looked up ({error}); give the path of a checkpoint folder."
        ) from None
    return path if exists or looks_like_a_path(name) else None


def on_this_machine(name: str, revision: str | None = None) -> Path:
    """The path for a name, or the model's snapshot in the Hugging Face cache.

    Args:
        name: a folder or a model id.
        revision: of a model id.

    Raises:
        CheckpointError: the model is not in the cache.
    """
    path = local_path(name)
    if path is not None:
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise CheckpointError(
            f"{name} is neither a folder on this machine nor a model in the Hugging Face cache, "
            "and nothing is fetched here; give the path of a checkpoint folder, or run "
            f"`hf download {name}` first."
        )
    folder = Path(cached).parent
    if not any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
        raise CheckpointError(
            f"the Hugging Face cache holds the configuration of {name} without its weights; run "
            f"`hf download {name}` first."
        )
    return folder


def read_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a model id, at a branch, tag or commit.

    Raises:
        CheckpointError: it is neither a local folder nor an available model.
    """
    from transformers import PreTrainedConfig

    try:
        config: dict[str, Any]
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError):
        at = f" at the revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name} is neither a folder on this machine nor a Hugging Face model whose "
            f"config.json can be fetched{at}; give the path of a checkpoint folder, or check the "
            "id and the network."
        ) from None
    return config


# A tokenizer's files, and those that state how to read it.
TOKENIZER = (
    *("config.json", "token*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map*"),
    *("*.model", "*.tiktoken", "*chat_template*", "tekken.json"),
)


def tokenizer_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a tokenizer's files; for a model id they are fetched.

    Returns:
        The folder; None for a single file, or if the files are not available.
    """
    if Path(name).exists():
        return Path(name) if Path(name).is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*TOKENIZER]))
    except Exception:  # no network, no such model: the hub's client raises various errors
        return None


@lru_cache
def read_shared_headers(name: str, revision: str | None = None) -> dict[str, Header] | None:
    """Every tensor of a model id, by the headers of its safetensors files.

    A few kilobytes of each file are fetched, or, with ``HF_HUB_OFFLINE``, the files in the cache
    are read.  The result is kept for the process, so that all callers see the same.

    Returns:
        The headers, or None if they are not available; tensors are then checked while they load.
    """
    from huggingface_hub import constants, get_safetensors_metadata, snapshot_download

    try:
        if constants.HF_HUB_OFFLINE:
            return read_headers(Path(snapshot_download(name, revision=revision)))
        files = get_safetensors_metadata(name, revision=revision).files_metadata.items()
    except Exception:  # no network, no such file: the hub's client raises various errors
        return None
    return {
        tensor: Header(tuple(info.shape), info.dtype, Path(file))
        for file, metadata in files
        for tensor, info in metadata.tensors.items()
    }
