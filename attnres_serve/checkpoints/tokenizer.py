"""The tokenizer of a checkpoint folder, for transformers and vLLM."""

from pathlib import Path
from typing import Any

from attnres_serve.checkpoints import tokenizer_class, tokenizer_copy
from attnres_serve.checkpoints.tokenizer_class import Way
from attnres_serve.errors import CheckpointError


def readable(folder: Path, rows: int | None = None, runs_code: bool = False) -> Path:
    """The folder from which transformers reads the tokenizer as in training.

    Args:
        folder: of the tokenizer.
        rows: of the embedding; None if unknown.
        runs_code: whether the checkpoint's code may be run (``--trust-remote-code``).

    Returns:
        The folder itself, or one with a copy in the cache.

    Raises:
        CheckpointError: there is no tokenizer, or a file is damaged.
    """
    way = tokenizer_class.reading(folder, runs_code).way
    if way in (Way.AS_IT_IS, Way.OWN_CODE):
        return folder
    return tokenizer_copy.of(folder, way, rows)


def load(folder: Path) -> Any:
    """A transformers tokenizer.

    Raises:
        CheckpointError: there is none, it is damaged, or only the checkpoint's code reads it.
    """
    from transformers import AutoTokenizer, logging

    place = readable(folder)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of unknown model types
    try:
        # If unset, transformers asks on the terminal whether to run the checkpoint's code.
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # faulty files raise various errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be loaded ({reason}); copy it beside the weights."
        ) from None
    finally:
        logging.set_verbosity(level)
