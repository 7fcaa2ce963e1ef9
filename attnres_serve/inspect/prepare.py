"""A checkpoint to inspect, and a prompt, as far as they are known before an engine starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attnres_serve.checkpoints import hub, needs, tokenizer
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.compat.token_texts import TokenTexts
from attnres_serve.depth.sites import Site, sites
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.flags import value_of, with_config

if TYPE_CHECKING:
    from attnres_serve.inspect.question import Question

# Tokens x sites: in a model of a hundred sites a gigabyte of numbers.
MAX_ROWS = 2**18
# Flags of vLLM's that would make the engine differ from what is validated here.
OURS = ("--model", "--tokenizer", "--worker-extension-cls")
MAX_LOGPROBS = 20  # vLLM's default of --max-logprobs


class Opened(NamedTuple):
    """A checkpoint that can be traced.

    Attributes:
        sites: all of them.
        tokenizer: of transformers'.
        vocabulary: how many tokens there are.
        longest: tokens of the longest sequence, by its context and by the memory of its traces.
        flags: of the engine, without the length.
    """

    sites: tuple[Site, ...]
    tokenizer: Any
    vocabulary: int
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
    parsed = check_folder(folder).translated(checkpoint)
    needs.check_heads(checkpoint, parsed)
    if max_model_len is not None:
        needs.check_context(
            checkpoint, parsed, [*with_config(flags), f"--max-model-len={max_model_len}"]
        )
    spec = parsed.spec
    if spec is None:
        raise CheckpointError(f"{checkpoint} has standard residuals: there is no site to look at.")
    config = parsed.config
    context = max_model_len or needs.context(config)
    ours = [f"--model={folder}", "--enforce-eager", "--disable-log-stats"]
    if value_of("--served-model-name", with_config(flags)) is None:
        ours.append(f"--served-model-name={checkpoint}")
    every = sites(spec)
    longest = min(context, MAX_ROWS // (sum(site.mixes for site in every) or 1))
    return Opened(every, tokenizer.load(folder), config["vocab_size"], longest, ours)


class Prepared(NamedTuple):
    """A checkpoint that can be served, and a prompt.

    Attributes:
        sites: of the model, as of ``Opened``.
        given: the prompt.
        flags: of an engine for prompt and answer.
        texts: those of token ids, each as it is behind another token.
    """

    sites: tuple[Site, ...]
    given: list[int]
    flags: list[str]
    texts: Callable[[Sequence[int]], list[str]]


def prepared(
    checkpoint: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    flags: list[str],
    max_model_len: int | None = None,
) -> Prepared:
    """Validate a checkpoint, and encode a prompt.

    Args:
        checkpoint: as of ``opened``.
        prompt: text or token ids.
        max_tokens: how long the answer may be.
        flags: of vLLM's engine, as given.
        max_model_len: longest sequence of the engine; None for as long as needed.

    Raises:
        CheckpointError: as of ``opened``.
        SettingError: the prompt has no token, one that is not in the vocabulary, or with its answer
            too many.
    """
    model = opened(checkpoint, max_model_len, flags)
    # The length is validated below.
    text = isinstance(prompt, str)
    given = model.tokenizer.encode(prompt, verbose=False) if text else [*prompt]
    if not given:
        raise SettingError("the prompt has no token; give some text.")
    for token in given:
        if not 0 <= token < model.vocabulary:
            raise SettingError(
                f"token {token} is not in the vocabulary of {model.vocabulary} tokens."
            )
    length = len(given) + max_tokens
    if length > model.longest:
        raise SettingError(
            f"prompt and answer may have {length} tokens; expected at most {model.longest}: "
            "shorten the prompt or ask for fewer tokens."
        )
    ours = [*model.flags, f"--max-model-len={max_model_len or length}"]
    return Prepared(model.sites, given, ours, TokenTexts(model.tokenizer).of)


def traced_sites(found: Prepared, asked: Question) -> list[Site]:
    """The sites that a question is about.

    Raises:
        SettingError: there is no such site or token, or a lens would read too much.
    """
    from attnres_serve.inspect import edits, question, readings

    chosen = question.chosen_sites(asked.sites, [site for site in found.sites if site.mixes])
    tokens = edits.positions(asked.tokens, len(found.given) + asked.max_tokens)
    if asked.lens is not None:
        readings.require_few(readings.readings(chosen), len(tokens))
    return chosen


def require_ours(flags: list[str]) -> None:
    """Refuse flags that would change what is validated.

    Raises:
        SettingError: there is one.
    """
    words = with_config(flags)
    for flag in OURS:
        if value_of(flag, words) is not None:
            raise SettingError(f"{flag} does not go with inspect; name a checkpoint that is whole.")
    if value_of("--max-model-len", words) is not None:  # of the command line, it would be ours
        raise SettingError(
            "--max-model-len stands in the file of --config, where inspect does not read it; take "
            "it out there and give it on the command line."
        )


def require_few_logprobs(name: str, wanted: int | None, flags: list[str]) -> None:
    """Refuse to name more tokens than an engine does, before one is started.

    Args:
        name: of what asks for them.
        wanted: how many; None for none.
        flags: of vLLM's engine, as given.

    Raises:
        SettingError: there are too many.
    """
    try:
        limit = int(value_of("--max-logprobs", with_config(flags)) or MAX_LOGPROBS)
    except ValueError:
        return  # vLLM refuses it
    if wanted is not None and -1 < limit < wanted:  # -1 is the whole vocabulary
        raise SettingError(f"{name} is {wanted}; expected at most {limit} (--max-logprobs).")
