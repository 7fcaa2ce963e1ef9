"""Checks of the source of speculative drafts, from files, before anything starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnres_serve import formats
from attnres_serve.checkpoints import draft_folder, hub
from attnres_serve.checkpoints.checked import Checkpoint, check_folder, check_hub
from attnres_serve.checkpoints.names import LOOKS_LIKE_ATTNRES, is_draft
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.compat import drafts
from attnres_serve.compat.arguments import Arguments
from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES, heads
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.settings import HEADS, MIXED, MODEL, MTP

SPECULATION = ("ngram", MODEL, MTP, *HEADS)  # methods; the first takes n-grams of the text
# Methods with a specific reason for their refusal (vLLM 0.32), as a part of a sentence.
REFUSED = {
    "extract_hidden_states": ", as vLLM's ExampleHiddenStatesConnector stores by CUDA streams and "
    "was not tried on a GPU",
}
FLAG = "--speculative-config"
# vLLM's flags for single keys of it.
PARTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def check_draft(name: str, target: Checkpoint, arguments: Arguments) -> None:
    """Check the drafts that vLLM's flags request: by a model, the checkpoint's or another head.

    A draft model with Attention Residuals is checked like a target.  vLLM checks one with standard
    residuals.

    Args:
        name: the target's name.
        target: the served checkpoint.
        arguments: of vLLM.

    Raises:
        CheckpointError: the draft cannot be served exactly or has another vocabulary, it is no head
            or no model, or the checkpoint has no head for drafts.
        SettingError: the method is not supported.
    """
    config, parsed = requested_config(arguments) or {}, target.translated(name)
    model, revision = config.get("model"), config.get("revision")
    method = _method_of(config, name)
    if method == MTP:
        other = drafts.another([name], arguments.revision, str(model or name), revision)
        check_head(parsed, target.index, other)
    elif method in HEADS:
        check_hook(parsed, method)
        draft_folder.require_head(parsed, method, model, revision)
    elif method == MODEL:
        _check_model(parsed, model, revision)


def _method_of(config: Mapping[str, Any], name: str) -> str | None:
    """The method that vLLM chooses for a configuration; None without drafts.

    Args:
        config: of drafts.
        name: of the served checkpoint, which may be the draft too.

    Raises:
        SettingError: it is not supported, or differs from the requested one.
    """
    model, method = config.get("model"), config.get("method")
    if method is None:
        if not isinstance(model, str):
            return None
        method = "ngram" if model in ("ngram", "[ngram]") else MODEL
    # vLLM has older names of the method for each family.
    if isinstance(method, str) and method.endswith(f"_{MTP}"):
        method = MTP
    require_method(method)
    if method not in (MODEL, MTP):
        return str(method)
    read = str(model or name)
    taken = draft_folder.named_method(read)
    if taken in HEADS and config.get("method") is None:
        return taken
    if taken is not None:
        raise SettingError(
            f"vLLM takes {read} for a head of the method {taken!r} by its name, whatever is asked "
            f"for, and speculative decoding by {method!r} was; rename the folder."
        )
    return str(method)


def require_method(method: Any) -> None:
    """Raise SettingError unless drafts by a method are supported."""
    if method not in SPECULATION:
        why = REFUSED.get(method, "") if isinstance(method, str) else ""
        raise SettingError(
            f"speculative decoding by {method!r} is not supported with AttnRes{why}; supported: "
            f"{', '.join(SPECULATION)}."
        )


def requested_config(arguments: Arguments) -> dict[str, Any] | None:
    """The configuration of drafts by vLLM's flags; None without such a flag."""
    parts = {key: getattr(arguments, name) for name, key in PARTS.items() if arguments.has(name)}
    if not parts and not arguments.has("speculative_config"):
        return None
    config = arguments.speculative_config or {}
    if not isinstance(config, Mapping):
        raise SettingError(f"found {FLAG} {json.dumps(config)}; expected a JSON object.")
    return {key.replace("-", "_"): value for key, value in config.items()} | parts


def _check_model(target: ParsedConfig, model: Any, revision: str | None) -> None:
    if not isinstance(model, str) or not model:
        raise CheckpointError(
            f"speculative decoding by {MODEL!r} needs the folder of a small model; give it as "
            "`model`."
        )
    sign = draft_folder.head_sign(draft_folder.config_of(model, revision), model, revision)
    if sign is not None:
        raise CheckpointError(
            f"{model} is a draft head, {sign}, and {MODEL!r} takes drafts of a whole model; "
            "choose another, or the method of that head."
        )
    folder = hub.local_path(model)
    draft = check_hub(model, revision) if folder is None else check_folder(Path(folder))
    config = draft.config if draft.parsed is None else draft.parsed.config
    size, target_size = config.get("vocab_size"), target.config["vocab_size"]
    if size not in (None, target_size):
        raise CheckpointError(
            f"the draft model {model} has a vocabulary of {size} tokens and the target one of "
            f"{target_size}; choose a draft with the target's tokenizer."
        )
    if draft.parsed is not None and FAMILIES[draft.parsed.family].draft is not None:
        raise CheckpointError(
            f"the draft model {model} is of the family {FAMILIES[draft.parsed.family].title}, of "
            "which vLLM takes every draft for a checkpoint's own head; choose a draft of another "
            "family."
        )
    if draft.parsed is None and (name := draft_folder.unknown_class(config)) is not None:
        raise CheckpointError(
            f"the draft model {model} has the architecture {name} in its config.json, of which "
            "neither vLLM nor transformers has a class; choose another draft."
        )


def check_head(target: ParsedConfig, index: TensorIndex | None, other: str | None = None) -> None:
    """Check that vLLM can draft with the head in a checkpoint.

    Args:
        target: the parsed config.json.
        index: the checkpoint's tensors; None if they are not available.
        other: another checkpoint whose head is requested; None for the served one.

    Raises:
        CheckpointError: it has no head, or one that vLLM's class would compute wrongly.
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


def check_hook(target: ParsedConfig, method: str) -> None:
    """Raise CheckpointError if vLLM's class of a family gives EAGLE heads no hidden states."""
    if Limit.SHOWN_LAYERS in FAMILIES[target.family].limits:
        raise CheckpointError(
            f"speculative decoding by {method!r} is not supported for "
            f"{FAMILIES[target.family].title}, whose class in vLLM hands on nothing from between "
            "its layers; "
            "`draft_model` takes drafts of another model."
        )


def head_problem(target: ParsedConfig, index: TensorIndex | None) -> str | None:
    """The reason why vLLM cannot draft with a checkpoint's head, as the end of a sentence.

    Args:
        target: the parsed config.json.
        index: the checkpoint's tensors; None if they are not available.
    """
    family = FAMILIES[target.family]
    if family.draft is None:
        return (
            f"needs a draft head, and none of {family.title} is supported; for drafts of another "
            'model write {"method": "draft_model", "model": its folder}.'
        )
    if (title := formats.by_name(target.format).layer_names_of) is not None:
        return (
            f"is not supported on {title} checkpoints, whose names vLLM's class of the head does "
            "not know; convert the model to the house format."
        )
    if target.config.get("quantization_config"):
        return "is not supported with quantised weights; start without --speculative-config."
    head, config = family.draft, target.config
    if head.reads == MIXED and target.spec is None:
        return (
            "is supported with Attention Residuals alone: the head reads what the last norm reads; "
            "start without --speculative-config."
        )
    if not is_count(head.layers(config)):
        return (
            f"needs layers that predict further tokens, and {head.keys[0]} is "
            f"{head.layers(config)!r}; start without --speculative-config."
        )
    return None if index is None else _tensors_problem(family, config, index)


def _tensors_problem(family: Family, config: Mapping[str, Any], index: TensorIndex) -> str | None:
    """The reason why vLLM cannot load a head, as the end of a sentence."""
    head_tensors = [name for name in index.stored if is_draft(name, config)]
    if not head_tensors:
        return (
            "needs tensors that predict further tokens, and the checkpoint has none; start without "
            "--speculative-config."
        )
    if (site := next(filter(LOOKS_LIKE_ATTNRES.search, head_tensors), None)) is not None:
        return (
            "needs a draft head with standard residuals, which vLLM's class has, and the tensor "
            f"{index.stored_names[site]} is depth attention; start without --speculative-config."
        )
    for name, shape in heads.shapes(family, config).items():
        stored = index.stored.get(name)
        if stored is None:
            return f"needs the tensor {name}, which is missing; start without --speculative-config."
        if stored.shape != shape:
            return (
                f"needs the tensor {index.stored_names[name]} as {list(shape)}, and it has the "
                f"shape {list(stored.shape)}; start without --speculative-config."
            )
    return None
