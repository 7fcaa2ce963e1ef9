"""``attnres_serve.trace``: a trace by a server that runs, or by one that is started for it."""

import difflib
import inspect
import json
import operator
import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic import ValidationError

from attnres_serve import mistakes
from attnres_serve.depth import edit_words
from attnres_serve.depth import edits as edit_lists
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, own_server
from attnres_serve.lens.ask import Server
from attnres_serve.lens.traced import Trace
from attnres_serve.lens.vectors import Tensors, encoded
from attnres_serve.tracing.question import Question


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
    vectors: bool = False,
    key: str | None = None,
    max_model_len: int | None = None,
    verbose: bool = False,
    **engine: Any,
) -> Trace:
    """Trace depth attention: weights, RMS of the sources and entropy at every site.

    Args:
        model_or_url: the address of a server that runs; or a checkpoint, for which a server is
            started and stopped again: its folder, or a Hugging Face model id.
        prompt: text or token ids.
        max_tokens: greedy tokens of an answer, which are traced as well.
        sites: indices; None for all that mix.
        tokens: positions in prompt and answer, or ``{"start": ..., "end": ...}`` without the end;
            None for all.
        edits: changes of what sites read: each as ``--edit`` of the command takes it, or as the
            server's route does.  ``replace`` is an array ``[d]``, or ``[T, d]`` of its tokens.
        logprobs: how many of the most probable tokens are named behind every token.
        lens: how many are named where each mix and each sum is read by the last norm and head.
        vectors: whether the trace has those of sources, mixes and sublayers.
        key: of the server; None for the one in OPENAI_API_KEY, if there is one.
        max_model_len: longest sequence of the server that is started; None for the model's own.
        verbose: whether to show what that server writes.
        engine: further flags of that server, which are those of vLLM and of ``serve``, such as
            ``dtype="float32"``.

    Raises:
        SettingError: there is no trace, and why, in one sentence.  It is a ValueError.
    """
    _require_no_typo(engine)
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
        vectors=vectors,
    )
    prompt = _prompt(prompt)
    tensors: Tensors = {}
    if where.startswith(ask.SERVERS):
        of_engine = [*engine, *["max_model_len"] * (max_model_len is not None)]
        if of_engine:
            raise SettingError(
                f"{of_engine[0]} is for a server that is started; the one at the address "
                "runs already."
            )
        return Trace(ask.ask(Server(where, key), prompt, question, tensors), tensors)
    if key is not None:
        raise SettingError("key is for a server that runs; one that is started has its own.")
    if question.edits:
        edit_lists.require_few_tokens(question.max_tokens, "max_tokens", "edits")
    words = _words({"max_model_len": max_model_len} | engine)
    with own_server.running(where, words, verbose) as server:
        return Trace(ask.ask(server, prompt, question, tensors), tensors)


def _require_no_typo(engine: Mapping[str, Any]) -> None:
    """Refuse a flag that is an argument of ``trace`` except for a few letters.

    No flag of vLLM's is as near to one: ``max_logprobs`` has 0.8.
    """
    own = [name for name in inspect.signature(trace).parameters if name != "engine"]
    for name in engine:
        if near := difflib.get_close_matches(name, own, n=1, cutoff=0.82):
            raise SettingError(f"{name} is no argument of trace; did you mean {near[0]}?")


def _question(**fields: Any) -> Question:
    try:
        return Question.model_validate(fields)
    except ValidationError as error:
        raise SettingError(mistakes.first(error.errors(), fields).sentence) from None


def _edits(edits: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[Any]:
    """The edits, those that are text as the command reads them."""
    each = edits if isinstance(edits, list | tuple) else [edits]
    return [_edit(edit, f"edits[{number}]") for number, edit in enumerate(each)]


def _edit(edit: Any, name: str) -> Any:
    if isinstance(edit, Mapping) and not isinstance(edit.get("replace", ""), str):
        return {**edit, "replace": encoded(edit["replace"], f"{name}.replace")}
    return edit_words.read(edit, name) if isinstance(edit, str) else edit


def _prompt(prompt: Any) -> str | list[int]:
    """Text, or token ids as numbers of Python's.

    Raises:
        SettingError: it is neither, or has half of a character.
    """
    if not isinstance(prompt, str):
        return _numbers("prompt", prompt, "text or ")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise SettingError(
            "prompt: found half of a surrogate pair; expected whole characters, as "
            'bytes.decode("utf-8") gives them.'
        ) from None
    return prompt


def _numbers(name: str, values: Any, other: str = "") -> list[int]:
    """The values as numbers of Python's, also those of NumPy.

    Bytes, sets, and the keys of a mapping can be counted through as well, and are no such list.

    Args:
        name: of the argument.
        values: what was given.
        other: what else may be given, for the sentence.

    Raises:
        SettingError: it is no list, or one of them is no whole number.
    """
    found = values
    try:
        if isinstance(values, bytes | bytearray | memoryview | Set | Mapping):
            raise TypeError
        numbers = []
        for found in values:
            if not _may_be_number(found):
                raise TypeError
            numbers.append(operator.index(found))
        return numbers
    except TypeError:
        raise SettingError(
            f"{name}: found {found!r:.60}; expected {other}a list of whole numbers."
        ) from None


def _may_be_number(value: Any) -> bool:
    """False for a truth value and for a row of a table, which Python may count as one."""
    dtype = str(getattr(value, "dtype", type(value).__name__))
    return not dtype.endswith("bool") and not getattr(value, "shape", ())


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
