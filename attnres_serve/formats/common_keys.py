"""Keys of config.json that formats with code of their own share with every family."""

from typing import Any

# Keys that mean the same for every model.
COMMON = (
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
)


def kept(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The entries of a config.json that stay in the family's: common ones and ``keys``."""
    return {key: config[key] for key in (*COMMON, *keys) if key in config}
