"""The result of parsing a config.json, the same for all formats."""

from dataclasses import dataclass
from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.families import FAMILIES

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


@dataclass(frozen=True)
class ParsedConfig:
    """A checkpoint in normalised terms.

    Attributes:
        format: name of the checkpoint format.
        family: name of the model family, a key of ``attnres_serve.families.FAMILIES``.
        config: the family's config.json.
        spec: the depth attention, None for a model with standard residuals.
        qk_norm_eps: epsilon of the per-head query and key norms if it differs from rms_norm_eps.
    """

    format: str
    family: str
    config: dict[str, Any]
    spec: AttnResSpec | None
    qk_norm_eps: float | None = None

    @property
    def layout(self) -> Layout:
        """The sublayers of the decoder."""
        return FAMILIES[self.family].layout(self.config)
