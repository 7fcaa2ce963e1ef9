"""The tokenizer of a checkpoint folder, as it is read by transformers and by vLLM."""

from pathlib import Path
from typing import Any

from attnres_serve.checkpoints import tokenizer_class, tokenizer_copy
from attnres_serve.checkpoints.tokenizer_class import Way
from attnres_serve.errors import CheckpointError


def readable(folder: Path, rows: int | None = None, runs_code: bool = False) -> Path:
    """The folder from which transformers reads a tokenizer as the model was trained with it.

    Args:
        folder: the tokenizer's.
        rows: of the embedding; None if they are not known.
        runs_code: whether code of the checkpoint's own may be run (``--trust-remote-code``).

    Returns:
        The folder itself, or one with a copy in the cache.

    Raises:
        CheckpointError: there is none, or a file is damaged.
    """
    way = tokenizer_class.reading(folder, runs_code).way
    if way in (Way.AS_IT_IS, Way.OWN_CODE):
        return folder
    return tokenizer_copy.of(folder, way, rows)


def load(folder: Path) -> Any:
    """A tokenizer of transformers'.

    Raises:
        CheckpointError: there is none, it is damaged, or only code of the checkpoint's reads it.
    """
    from transformers import AutoTokenizer, logging

    place = readable(folder)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of model types that it does not know
    try:
        # Unset, it asks on the terminal whether to run code of the checkpoint's.
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's files may do wrong
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be loaded ({reason}); copy it beside the weights."
        ) from None
    finally:
        logging.set_verbosity(level)
