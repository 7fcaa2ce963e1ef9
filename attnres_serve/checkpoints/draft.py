"""The draft model of speculative decoding, checked by its files before anything is started."""

import json
from pathlib import Path

from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.checked import check_folder, check_hub
from attnres_serve.errors import CheckpointError
from attnres_serve.flags import value_of
from attnres_serve.formats.parsed_config import ParsedConfig


def check_draft(target: ParsedConfig, words: list[str]) -> None:
    """Check the draft that ``--speculative-config`` names, if it is a model of its own.

    A draft with Attention Residuals is checked as a target is.  One with standard residuals is
    vLLM's.  vLLM itself refuses JSON that it cannot read.

    Raises:
        CheckpointError: the draft cannot be served exactly, or has another vocabulary.
    """
    try:
        config = json.loads(value_of("--speculative-config", words) or "{}")
    except json.JSONDecodeError:
        return
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, str) or config.get("method", "draft_model") != "draft_model":
        return
    revision = config.get("revision")
    folder = hub.local_path(model)
    draft = check_hub(model, revision) if folder is None else check_folder(Path(folder))
    config = draft.config if draft.parsed is None else draft.parsed.config
    size, wanted = config.get("vocab_size"), target.config["vocab_size"]
    if size not in (None, wanted):
        raise CheckpointError(
            f"the draft model {model} has a vocabulary of {size} tokens and the target one of "
            f"{wanted}; choose a draft with the target's tokenizer."
        )
