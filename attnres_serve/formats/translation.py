"""What a format makes of a config.json."""

from dataclasses import dataclass
from typing import Any

from attnres_serve.spec import AttnResSpec


@dataclass(frozen=True)
class Translation:
    """A checkpoint in normalised terms.

    Attributes:
        format: name of the checkpoint format.
        base: backbone family, a key of ``attnres_serve.families.FAMILIES``.
        config: the base family's config.json.
        spec: the depth attention, None for a model with standard residuals.
        qk_norm_eps: epsilon of the per-head query and key norms where it differs from
            rms_norm_eps.
    """

    format: str
    base: str
    config: dict[str, Any]
    spec: AttnResSpec | None
    qk_norm_eps: float | None = None
