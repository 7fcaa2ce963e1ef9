"""The error for a checkpoint that is not recognised as one with AttnRes."""

from collections.abc import Collection
from typing import Any

from attnres_serve import formats
from attnres_serve.checkpoints import plain_config
from attnres_serve.checkpoints.tensor_names import names_of_any
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES


def of_checkpoint(name: str, config: dict[str, Any], command: str) -> CheckpointError:
    """``no_attnres`` with the names of the tensors of the checkpoint ``name``."""
    is_known = str(config.get("model_type")) in FAMILIES
    return no_attnres(name, config, names_of_any(name) if is_known else (), command)


def no_attnres(
    name: str, config: dict[str, Any], names: Collection[str], command: str
) -> CheckpointError:
    """The error, with what may be done instead.

    Args:
        name: the checkpoint's name, for messages.
        config: the content of its config.json.
        names: of its tensors, as far as they are known.
        command: of ``convert``, to which options can be added.
    """
    if queries := plain_config.queries(config, names):
        return CheckpointError(queries.advice(name, command))
    message = (
        f"{name} is not an AttnRes checkpoint that can be served: found model_type "
        f"{config.get('model_type')!r} and architectures "
        f"{config.get('architectures')!r}; {formats.SUPPORTED}."
    )
    if str(config.get("model_type")) in FAMILIES:
        way = f"{command} --add-zero-queries --block-size 4"
        message += f" Make an AttnRes model of it, with queries to train, by `{way}`."
    return CheckpointError(message)
