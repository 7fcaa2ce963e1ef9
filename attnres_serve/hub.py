"""Checkpoints named by a Hugging Face model id."""

from typing import Any

from attnres_serve.errors import CheckpointError


def looks_like_a_path(name: str) -> bool:
    """Whether a name that does not exist on disk was meant as a path all the same."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name in ("", "/")


def read_config(name: str) -> dict[str, Any]:
    """The config.json of a model id.

    Raises:
        CheckpointError: neither a local folder nor a model that can be had.
    """
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        raise CheckpointError(
            f"{name} is neither a folder on this machine nor a Hugging Face model whose "
            "config.json can be fetched; give the path of a checkpoint folder, or check the id and "
            "the network."
        ) from None
    return config
