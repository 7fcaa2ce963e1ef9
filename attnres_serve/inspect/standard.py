"""A checkpoint with standard residuals, next to which one with Attention Residuals is measured."""

from pathlib import Path

from attnres_serve.bench import baseline
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.source import standard_model
from attnres_serve.checkpoints.files import read_headers
from attnres_serve.checkpoints.tensor_index import check_headers
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.parsed_config import ParsedConfig


def translated(name: str, folder: Path) -> ParsedConfig:
    """What a checkpoint means, whatever its residuals are.

    Args:
        name: what it is called.
        folder: where its files are.

    Raises:
        CheckpointError: neither the plugin nor vLLM alone serves it here, or it is no model of a
            family whose norms are known.
    """
    found = check_folder(folder)
    if found.parsed is not None:
        return found.parsed
    parsed = standard_model(name, found.config, "be measured")
    family = FAMILIES[parsed.base]
    if baseline.is_ours(family):
        raise CheckpointError(
            f"{name} cannot be measured: vLLM serves {family.title} with standard residuals on a "
            "GPU alone; measure it there."
        )
    check_headers(parsed, read_headers(folder))
    return parsed
