"""Validation of all tensors of a checkpoint together, from the headers of its files."""

from collections.abc import Mapping

from attnres_serve import formats
from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.renaming.refusal import refuse_renamed
from attnres_serve.checkpoints.renaming.rename import CONVERT_COMMAND
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import Stored
from attnres_serve.formats.parsed_config import ParsedConfig


def check_headers(
    parsed: ParsedConfig, headers: Mapping[str, Stored], command: str = CONVERT_COMMAND
) -> TensorIndex:
    """Validate that tensors are exactly those that a model needs, by their headers.

    All are entered before the first check: a tensor under a wrong name is both missing and left
    over, and the error about the missing one is clearer.

    Args:
        parsed: the parsed config.json.
        headers: the tensors by the checkpoint's names.
        command: a ``convert`` command that could rename them.

    Raises:
        CheckpointError: one is missing, left over, misshapen or of a type that cannot be read.
    """
    base = BaseTensors(parsed.family, parsed.config)
    index = TensorIndex(formats.by_name(parsed.format), base, parsed.spec)
    refuse_renamed(index, headers, command)
    for stored_name, header in headers.items():
        index.enter(stored_name, header)
    index.close()
    for name in index.stored:
        index.check(name)
    return index
