"""The result of parsing a config.json, the same for all formats."""

from dataclasses import dataclass
from typing import Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.families import FAMILIES


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
