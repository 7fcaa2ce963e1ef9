"""What a checkpoint's name means: a folder on this machine or a Hugging Face model id."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints.files import Header, read_headers
from attnres_serve.errors import CheckpointError


def looks_like_a_path(name: str) -> bool:
    """Whether a name that does not exist on disk was meant as a path all the same."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name in ("", "/")


def local_path(name: str) -> Path | None:
    """The path that a name means, whether it exists or not; None for a model id.

    Raises:
        CheckpointError: a name that no file can have.
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
    """The path that a name means, or the model's snapshot in the Hugging Face cache.

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
        CheckpointError: neither a local folder nor a model that can be had.
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


# What tells how a tokenizer is read, and the tokenizer.
TOKENIZER = (
    *("config.json", "token*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map*"),
    *("*.model", "*.tiktoken", "*chat_template*", "tekken.json"),
)


def tokenizer_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a tokenizer's files, which are fetched for a model id.

    Returns:
        The folder; None for a single file, and where the files cannot be had.
    """
    if Path(name).exists():
        return Path(name) if Path(name).is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*TOKENIZER]))
    except Exception:  # no network, no such model: whatever the hub's client raises
        return None


@lru_cache
def read_shared_headers(name: str, revision: str | None = None) -> dict[str, Header] | None:
    """Every tensor of a model id, by the headers of its safetensors files.

    A few kilobytes are fetched of each file, or, with ``HF_HUB_OFFLINE``, the files in the cache
    are read.  Asked once a process, so that all its parts see the same.

    Returns:
        The headers, or None where they cannot be had; tensors are then checked while they load.
    """
    from huggingface_hub import constants, get_safetensors_metadata, snapshot_download

    try:
        if constants.HF_HUB_OFFLINE:
            return read_headers(Path(snapshot_download(name, revision=revision)))
        files = get_safetensors_metadata(name, revision=revision).files_metadata.items()
    except Exception:  # no network, no such file, other names: whatever the hub's client raises
        return None
    return {
        tensor: Header(tuple(info.shape), info.dtype, Path(file))
        for file, metadata in files
        for tensor, info in metadata.tensors.items()
    }
