"""``attnres_serve.trace``: a trace by an engine in this process, or by a server that runs."""

import inspect
import json
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from tqdm import tqdm

from attnres_serve import flags, mistakes, output
from attnres_serve.compat import source
from attnres_serve.errors import SettingError
from attnres_serve.inspect import ask, given, prepare
from attnres_serve.inspect import edits as edit_lists
from attnres_serve.inspect.answer import Trace as Answer
from attnres_serve.inspect.question import Question
from attnres_serve.inspect.traced import Trace

SERVERS = ("http://", "https://")


def trace(
    model_or_url: str | os.PathLike[str],
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 0,
    sites: Sequence[int] | None = None,
    tokens: Sequence[int] | Mapping[str, int] | None = None,
    edits: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    logprobs: int | None = None,
    lens: int | None = None,
    key: str | None = None,
    max_model_len: int | None = None,
    verbose: bool = False,
    **engine: Any,
) -> Trace:
    """Trace depth attention: weights, RMS of the sources and entropy at every site.

    Args:
        model_or_url: the address of a server that runs; or a checkpoint, for which an engine is
            started in this process and ended again: its folder, or a model id whose files are in
            the Hugging Face cache.
        prompt: text or token ids.
        max_tokens: greedy tokens of an answer, which are traced as well.
        sites: indices; None for all that mix.
        tokens: positions in prompt and answer, or ``{"start": ..., "end": ...}`` without the end;
            None for all.
        edits: changes of what sites read: each as ``--edit`` of the command takes it, or as the
            server's route does.
        logprobs: how many of the most probable tokens are named behind every token.
        lens: how many are named where each mix and each sum is read by the last norm and head.
        key: of the server; None for the one in OPENAI_API_KEY, if there is one.
        max_model_len: longest sequence of the engine; None for as long as needed.
        verbose: whether to show what vLLM and torch write.  Otherwise whatever this process writes
            to stdout and stderr while the engine is there is kept back.
        engine: further flags of vLLM's engine, such as ``dtype="float32"``.

    Raises:
        CheckpointError: the checkpoint cannot be served, has no sites, or lacks its tokenizer.
        SettingError: anything else, in one sentence.  Both are ValueErrors.
    """
    where = os.fspath(model_or_url)
    if tokens is not None and not isinstance(tokens, Mapping):
        tokens = _numbers("tokens", tokens)
    question = _question(
        max_tokens=max_tokens,
        sites=None if sites is None else _numbers("sites", sites),
        tokens=tokens,
        edits=_edits(edits),
        logprobs=logprobs,
        lens=lens,
    )
    prompt = prompt if isinstance(prompt, str) else _numbers("prompt", prompt)
    if where.startswith(SERVERS):
        of_engine = [*engine, *["max_model_len"] * (max_model_len is not None)]
        if of_engine:
            raise SettingError(f"{of_engine[0]} is for an engine; with an address none is started.")
        return Trace(ask.ask_server(where, prompt, question, tqdm(disable=True), key))
    if key is not None:
        raise SettingError("key is for a server; an engine in this process asks for none.")
    with output.libraries_hidden("trace", verbose):
        return Trace(_by_engine(where, prompt, question, max_model_len, _words(engine)))


def _by_engine(
    checkpoint: str,
    prompt: str | list[int],
    question: Question,
    max_model_len: int | None,
    words: list[str],
) -> Answer:
    """Everything that can be validated before an engine starts is."""
    own = {f"--{name.replace('_', '-')}" for name in inspect.signature(trace).parameters}
    flags.require_known(words, source.flags_of_engine(), own, source.choices)
    prepare.require_ours(words)
    for field in ("logprobs", "lens"):
        prepare.require_few_logprobs(field, getattr(question, field), words)
    if question.edits:
        edit_lists.require_few_tokens(question.max_tokens, "max_tokens", "edits")
    prepared = prepare.prepared(checkpoint, prompt, question.max_tokens, words, max_model_len)
    length = len(prepared.given) + question.max_tokens
    resolved = edit_lists.resolve(question.edits, prepared.sites, length)
    sites = prepare.traced_sites(prepared, question)
    return ask.ask_engine(prepared, words, sites, question, resolved, tqdm(disable=True))


def _question(**fields: Any) -> Question:
    try:
        return Question.model_validate(fields)
    except ValidationError as error:
        raise SettingError(mistakes.first(error.errors(), fields).sentence) from None


def _edits(edits: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[Any]:
    """The edits, those that are text as the command reads them."""
    each = edits if isinstance(edits, list | tuple) else [edits]
    return [
        given.edit(edit, f"edits[{number}]") if isinstance(edit, str) else edit
        for number, edit in enumerate(each)
    ]


def _numbers(name: str, values: Sequence[int]) -> list[int]:
    """The values as numbers of Python's, also those of NumPy.

    Raises:
        SettingError: one is no whole number.
    """
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise SettingError(f"{name}: {error}; expected a list of whole numbers.") from None


def _words(engine: Mapping[str, Any]) -> list[str]:
    """Flags as a command line has them: ``enforce_eager=True`` is ``--enforce-eager``."""
    words: list[str] = []
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words
