"""``attnres_serve.trace``: a trace from a running server, or from a temporary one."""

import difflib
import inspect
import json
import operator
import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic import ValidationError

from attnres_serve import mistakes
from attnres_serve.depth import edit_text, resolved_edits
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, temporary_server
from attnres_serve.lens.ask import Server
from attnres_serve.lens.traced import Trace
from attnres_serve.lens.vectors import Tensors, encoded
from attnres_serve.tracing.options import TraceOptions


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
        model_or_url: the address of a running server; or a checkpoint (a folder or a Hugging Face
            model id), for which a temporary server is started.
        prompt: text or token ids.
        max_tokens: number of greedy tokens to generate and trace as well.
        sites: indices; None for all sites that mix.
        tokens: positions in prompt and generated text, or ``{"start": ..., "end": ...}`` without
            the end; None for all.
        edits: edits of what sites read, each as text, like ``--edit`` of the command, or as an
            object, like in the server's route.  ``replace`` is an array ``[d]``, or ``[T, d]`` for
            its tokens.
        logprobs: number of the most probable next tokens to return for every token.
        lens: number of the most probable tokens to return for each mix and each sum, read through
            the last norm and the head.
        vectors: whether to return the vectors of sources, mixes and sublayers.
        key: API key of the server; None for the variable OPENAI_API_KEY, if it is set.
        max_model_len: longest sequence of the temporary server; None for the model's default.
        verbose: whether to show the output of that server.
        engine: further flags of that server, of vLLM or of ``serve``, such as
            ``dtype="float32"``.

    Raises:
        SettingError: there is no trace; the message is one sentence.  It is a ValueError.
    """
    _require_no_typo(engine)
    where = os.fspath(model_or_url)
    if tokens is not None and not isinstance(tokens, Mapping):
        tokens = _numbers("tokens", tokens)
    options = _options(
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
        engine_flags = [*engine, *["max_model_len"] * (max_model_len is not None)]
        if engine_flags:
            raise SettingError(
                f"{engine_flags[0]} is for a server that is started; the one at the address "
                "runs already."
            )
        return Trace(ask.ask(Server(where, key), prompt, options, tensors), tensors)
    if key is not None:
        raise SettingError("key is for a server that runs; one that is started has its own.")
    if options.edits:
        resolved_edits.require_few_tokens(options.max_tokens, "max_tokens", "edits")
    flags = _flags({"max_model_len": max_model_len} | engine)
    with temporary_server.running(where, flags, verbose) as server:
        return Trace(ask.ask(server, prompt, options, tensors), tensors)


def _require_no_typo(engine: Mapping[str, Any]) -> None:
    """Refuse a flag that looks like a misspelt argument of ``trace``.

    vLLM's flags differ more: the nearest, ``max_logprobs``, has a similarity of 0.8.
    """
    parameters = [name for name in inspect.signature(trace).parameters if name != "engine"]
    for name in engine:
        if near := difflib.get_close_matches(name, parameters, n=1, cutoff=0.82):
            raise SettingError(f"{name} is no argument of trace; did you mean {near[0]}?")


def _options(**fields: Any) -> TraceOptions:
    try:
        return TraceOptions.model_validate(fields)
    except ValidationError as error:
        raise SettingError(mistakes.first(error.errors(), fields).sentence) from None


def _edits(edits: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[Any]:
    """The edits; text is parsed like the command's ``--edit``."""
    each = edits if isinstance(edits, list | tuple) else [edits]
    return [_edit(edit, f"edits[{number}]") for number, edit in enumerate(each)]


def _edit(edit: Any, name: str) -> Any:
    if isinstance(edit, Mapping) and not isinstance(edit.get("replace", ""), str):
        return {**edit, "replace": encoded(edit["replace"], f"{name}.replace")}
    return edit_text.read(edit, name) if isinstance(edit, str) else edit


def _prompt(prompt: Any) -> str | list[int]:
    """Text, or token ids as Python integers.

    Raises:
        SettingError: it is neither, or has half of a surrogate pair.
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
    """The values as Python integers, also from NumPy.

    Bytes, sets and mappings can be iterated too, but are refused.

    Args:
        name: name of the argument.
        values: its value.
        other: other accepted types, for the message.

    Raises:
        SettingError: it is no list, or an item is no whole number.
    """
    culprit = values
    try:
        if isinstance(values, bytes | bytearray | memoryview | Set | Mapping):
            raise TypeError
        numbers = []
        for culprit in values:
            if not _may_be_number(culprit):
                raise TypeError
            numbers.append(operator.index(culprit))
        return numbers
    except TypeError:
        raise SettingError(
            f"{name}: found {culprit!r:.60}; expected {other}a list of whole numbers."
        ) from None


def _may_be_number(value: Any) -> bool:
    """False for booleans and arrays, which Python may convert to an integer."""
    dtype = str(getattr(value, "dtype", type(value).__name__))
    return not dtype.endswith("bool") and not getattr(value, "shape", ())


def _flags(engine: Mapping[str, Any]) -> list[str]:
    """Command-line flags from arguments: ``enforce_eager=True`` is ``--enforce-eager``."""
    flags: list[str] = []
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags
