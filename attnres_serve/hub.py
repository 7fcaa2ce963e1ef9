"""Checkpoints named by a Hugging Face model id."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from attnres_serve.errors import CheckpointError


def looks_like_a_path(name: str) -> bool:
    """Whether a name that does not exist on disk was meant as a path all the same."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name in ("", "/")


def read_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a model id, at a branch, tag or commit.

    Raises:
        CheckpointError: neither a local folder nor a model that can be had.
    """
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError):
        at = f" at the revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name} is neither a folder on this machine nor a Hugging Face model whose "
            f"config.json can be fetched{at}; give the path of a checkpoint folder, or check the "
            "id and the network."
        ) from None
    return config


@lru_cache
def read_shapes(name: str, revision: str | None = None) -> dict[str, tuple[int, ...]] | None:
    """Name and shape of every tensor of a model id, by the headers of its safetensors files.

    A few kilobytes are fetched of each file, or, with ``HF_HUB_OFFLINE``, the files in the cache
    are read.  Asked once a process, so that all its parts see the same.

    Returns:
        The shapes, or None where they cannot be had; the tensors are then judged while they load.
    """
    from huggingface_hub import constants, get_safetensors_metadata, snapshot_download

    from attnres_serve.checkpoint import read_shapes as read_folder

    try:
        if constants.HF_HUB_OFFLINE:
            return read_folder(Path(snapshot_download(name, revision=revision)))
        files = get_safetensors_metadata(name, revision=revision).files_metadata.values()
    except Exception:  # no network, no such file, other names: whatever the hub's client raises
        return None
    return {tensor: tuple(info.shape) for file in files for tensor, info in file.tensors.items()}
