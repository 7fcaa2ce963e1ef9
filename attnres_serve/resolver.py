"""The resolver: from a config.json to a normalised checkpoint.

vLLM's configuration path and our own commands both go through ``resolve``, so that a checkpoint
means the same to every process.
"""

from typing import Any

from attnres_serve import formats
from attnres_serve.formats import unsupported
from attnres_serve.formats.translation import Translation


def resolve(config: dict[str, Any], own_code: bool = False) -> Translation | None:
    """Recognise a checkpoint and translate its configuration.

    Args:
        config: the content of config.json.
        own_code: whether the caller may run the repository's own code (``auto_map`` with
            trust_remote_code).  A checkpoint that no format claims is then left to its code; one
            that is claimed is ours with or without, as vLLM prefers its own classes too.

    Returns:
        The translation, or None where this is not an AttnRes checkpoint that we should touch.

    Raises:
        CheckpointError: for AttnRes that cannot be served exactly.
    """
    for module in formats.SERVED:
        if module.claims(config):
            return module.translate(config)
    if config.get("model_type") == "transformer" and "auto_map" in config:
        return None  # a foreign repository with code of its own under a name that anyone may use
    if not (own_code and "auto_map" in config):
        unsupported.refuse_if_attnres(config)
    return None
