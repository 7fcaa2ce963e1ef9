"""A checkpoint to inspect, as far as it is known before an engine starts."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from attnres_serve.checkpoints import hub, needs, tokenizer
from attnres_serve.checkpoints.validate import validate
from attnres_serve.depth.sites import Site, sites
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.flags import value_of

# Tokens x sites: in a model of a hundred sites a gigabyte of numbers.
MAX_ROWS = 2**18


class Opened(NamedTuple):
    """A checkpoint that can be traced.

    Attributes:
        sites: all of them.
        tokenizer: of transformers'.
        longest: tokens of the longest sequence, by its context and by the memory of its traces.
        flags: of the engine, without the length.
    """

    sites: tuple[Site, ...]
    tokenizer: Any
    longest: int
    flags: list[str]


def opened(checkpoint: str, max_model_len: int | None, flags: list[str]) -> Opened:
    """Validate a checkpoint and load its tokenizer.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        max_model_len: as given.
        flags: of vLLM's engine, as given.

    Raises:
        CheckpointError: it cannot be served, has no sites, or lacks its tokenizer.
        SettingError: it has a shorter context than ``max_model_len``.
    """
    folder = hub.on_this_machine(checkpoint)
    translation = validate(folder).translated(checkpoint)
    needs.validate_heads(checkpoint, translation)
    if max_model_len is not None:
        needs.validate_context(
            checkpoint, translation, [*flags, f"--max-model-len={max_model_len}"]
        )
    spec = translation.spec
    if spec is None:
        raise CheckpointError(f"{checkpoint} has standard residuals: there is no site to look at.")
    context = max_model_len or translation.config["max_position_embeddings"]
    ours = [f"--model={folder}", "--enforce-eager", "--disable-log-stats"]
    if value_of("--served-model-name", flags) is None:
        ours.append(f"--served-model-name={checkpoint}")
    every = sites(spec)
    longest = min(context, MAX_ROWS // sum(site.mixes for site in every))
    return Opened(every, tokenizer.load(folder), longest, ours)


def name_of(checkpoint: str, flags: list[str]) -> str:
    """What figures call a checkpoint."""
    return value_of("--served-model-name", flags) or checkpoint


class Asked(NamedTuple):
    """What of a checkpoint and a prompt is known without an engine."""

    sites: tuple[Site, ...]
    given: list[int]
    flags: list[str]
    decode: Callable[[list[int]], str]


def asked(checkpoint: str, own: argparse.Namespace, flags: list[str]) -> Asked:
    """Validate a checkpoint and a prompt.

    Args:
        checkpoint: as of ``opened``.
        own: the flags of ours, with the prompt as text.
        flags: of vLLM's engine, as given.

    Raises:
        CheckpointError: as of ``opened``.
        SettingError: the prompt has no token, or with its answer too many.
    """
    model = opened(checkpoint, own.max_model_len, flags)
    given = model.tokenizer.encode(own.prompt, verbose=False)  # its length is validated below
    if not given:
        raise SettingError("--prompt has no token; give some text.")
    length = len(given) + own.max_tokens
    if length > model.longest:
        raise SettingError(
            f"prompt and answer may have {length} tokens; expected at most {model.longest}: "
            "shorten --prompt or give fewer --max-tokens."
        )
    ours = [*model.flags, f"--max-model-len={own.max_model_len or length}"]
    return Asked(model.sites, given, ours, model.tokenizer.decode)
