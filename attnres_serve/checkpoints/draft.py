"""What drafts of speculative decoding come from, checked by files before anything is started."""

import json
from pathlib import Path

from attnres_serve import formats
from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.checked import Checkpoint, check_folder, check_hub
from attnres_serve.checkpoints.names import LOOKS_LIKE_ATTNRES, is_draft
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.compat import engine_config
from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.latent import FURTHER
from attnres_serve.flags import value_of
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.settings import MTP


def check_draft(name: str, target: Checkpoint, words: list[str]) -> None:
    """Check what ``--speculative-config`` takes drafts from: a model, or the checkpoint's own head.

    A draft with Attention Residuals is checked as a target is.  One with standard residuals is
    vLLM's.  vLLM itself refuses JSON that it cannot read.

    Args:
        name: what the target is called.
        target: the checkpoint that is served.
        words: flags of vLLM's.

    Raises:
        CheckpointError: the draft cannot be served exactly or has another vocabulary, or the
            checkpoint has no head that vLLM could take drafts from.
    """
    try:
        config = json.loads(value_of("--speculative-config", words) or "{}")
    except json.JSONDecodeError:
        return
    if not isinstance(config, dict):
        return
    model, method, parsed = config.get("model"), config.get("method"), target.translated(name)
    # vLLM has older names of the method for each family.
    if isinstance(method, str) and (method == MTP or method.endswith(f"_{MTP}")):
        served = [name], value_of("--revision", words)
        other = engine_config.another(*served, str(model or name), config.get("revision"))
        check_head(parsed, target.index, other)
    elif isinstance(model, str) and method in (None, "draft_model"):
        _check_model(parsed, model, config.get("revision"))


def _check_model(target: ParsedConfig, model: str, revision: str | None) -> None:
    folder = hub.local_path(model)
    draft = check_hub(model, revision) if folder is None else check_folder(Path(folder))
    config = draft.config if draft.parsed is None else draft.parsed.config
    size, wanted = config.get("vocab_size"), target.config["vocab_size"]
    if size not in (None, wanted):
        raise CheckpointError(
            f"the draft model {model} has a vocabulary of {size} tokens and the target one of "
            f"{wanted}; choose a draft with the target's tokenizer."
        )
    if draft.parsed is not None and FAMILIES[draft.parsed.base].draft is not None:
        raise CheckpointError(
            f"the draft model {model} is of the family {FAMILIES[draft.parsed.base].title}, of "
            "which vLLM takes every draft for a checkpoint's own head; choose a draft of another "
            "family."
        )


def check_head(target: ParsedConfig, index: TensorIndex | None, other: str | None = None) -> None:
    """Check that vLLM can take drafts from a checkpoint's own head.

    Args:
        target: what the resolver made of config.json.
        index: the checkpoint's tensors, None where they cannot be had.
        other: the checkpoint whose head is to be used; None for the served one.

    Raises:
        CheckpointError: it has no such head, or one that vLLM's class would compute wrongly.
    """
    problem = head_problem(target, index)
    if other is not None:
        problem = (
            f"takes drafts from the head of {other}, which is not the served checkpoint (vLLM "
            "takes any draft of a family that has such heads for one); leave `model` out and give "
            "the served `revision` for the checkpoint's own head, or choose another draft."
        )
    if problem is not None:
        raise CheckpointError(f"speculative decoding by {MTP!r} {problem}")


def head_problem(target: ParsedConfig, index: TensorIndex | None) -> str | None:
    """What keeps vLLM from taking drafts from a checkpoint's own head, as the rest of a sentence.

    Args:
        target: what the resolver made of config.json.
        index: the checkpoint's tensors, None where they cannot be had.
    """
    family = FAMILIES[target.base]
    if family.draft is None:
        return (
            f"needs a draft head, and none of {family.title} is supported; for drafts of another "
            'model write {"method": "draft_model", "model": its folder}.'
        )
    if (title := formats.own_layer_names(target.format)) is not None:
        return (
            f"is not supported on {title} checkpoints, whose names vLLM's class of the head does "
            "not know; convert the model to the house format."
        )
    if target.config.get("quantization_config"):
        return "is not supported with quantised weights; start without --speculative-config."
    if not is_count(target.config.get(FURTHER)):
        return (
            f"needs layers that predict further tokens, and {FURTHER} is "
            f"{target.config.get(FURTHER)!r}; start without --speculative-config."
        )
    head = [name for name in index.stored if is_draft(name, target.config)] if index else None
    if head == []:
        return (
            "needs tensors that predict further tokens, and the checkpoint has none; start without "
            "--speculative-config."
        )
    if index and (site := next(filter(LOOKS_LIKE_ATTNRES.search, head or ()), None)):
        return (
            "needs a draft head with standard residuals, which vLLM's class has, and the tensor "
            f"{index.own_names[site]} is depth attention; start without --speculative-config."
        )
    return None
