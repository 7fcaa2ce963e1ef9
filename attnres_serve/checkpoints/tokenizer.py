"""The tokenizer of a checkpoint folder, for what is asked of an engine by token ids."""

from pathlib import Path
from typing import Any

from attnres_serve.errors import CheckpointError


def load(folder: Path) -> Any:
    """A tokenizer of transformers'.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer, logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of model types that it does not know
    try:
        # Unset, it asks on the terminal whether to run code of the checkpoint's.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's files may do wrong
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be loaded ({reason}); copy it beside the weights."
        ) from None
    finally:
        logging.set_verbosity(level)
