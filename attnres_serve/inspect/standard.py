"""A checkpoint with standard residuals, next to which one with Attention Residuals is measured."""

from pathlib import Path

from attnres_serve.bench import baseline
from attnres_serve.checkpoints.convert.source import standard_model
from attnres_serve.checkpoints.files import read_headers
from attnres_serve.checkpoints.inventory import validate_headers
from attnres_serve.checkpoints.validate import validate
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.translation import Translation


def translated(name: str, folder: Path) -> Translation:
    """What a checkpoint means, whatever its residuals are.

    Args:
        name: what it is called.
        folder: where its files are.

    Raises:
        CheckpointError: neither the plugin nor vLLM alone serves it here, or it is no model of a
            family whose norms are known.
    """
    found = validate(folder)
    if found.translation is not None:
        return found.translation
    translation = standard_model(name, found.config, "be measured")
    family = FAMILIES[translation.base]
    if baseline.is_ours(family):
        raise CheckpointError(
            f"{name} cannot be measured: vLLM serves {family.title} with standard residuals on a "
            "GPU alone; measure it there."
        )
    validate_headers(translation, read_headers(folder))
    return translation
