"""Input of `attnres-serve inspect`: a prompt, edits, or a trace that was written before."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attnres_serve import texts
from attnres_serve.errors import SettingError
from attnres_serve.lens import files
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.edits import KINDS, MOST, Edit, require_few_tokens

STDIN = "-"


def prompt(text: str | None, file: str | None) -> str:
    """The prompt that ``--prompt`` or ``--prompt-file`` gives, one of which may be ``-`` for stdin.

    The text of a file is taken as it is, a line break at its end included; a byte order mark is no
    part of it.

    Args:
        text: the value of ``--prompt``.
        file: that of ``--prompt-file``.

    Raises:
        SettingError: neither, both, an empty prompt, or one that cannot be read.
    """
    if (text is None) == (file is None):
        raise SettingError("give the prompt by --prompt TEXT or --prompt-file FILE, one of them.")
    source = "--prompt" if file is None else f"--prompt-file {file}"
    if STDIN in (text, file):
        content = sys.stdin.buffer.read()
        source, text = "the standard input", texts.decoded(content, "the prompt in stdin")
    elif text is not None:  # with Python's surrogates for bytes that are no text
        content = text.encode(errors="surrogatepass")
        text = texts.decoded(content, f"the prompt in {source}")
    elif file is not None:
        try:
            text = texts.decoded(Path(file).read_bytes(), f"the prompt in {file}")
        except OSError as error:
            raise SettingError(f"--prompt-file: {file} cannot be read ({error}).") from None
    if not text:
        raise SettingError(f"{source} is empty; give some text.")
    return text


def trace(path: str) -> TraceAnswer:
    """A trace that ``--out FILE.json``, the server's route or ``Trace.save`` wrote.

    Raises:
        SettingError: the file is none, its numbers do not fit its tokens and sources, or there is
            nothing to draw.
    """
    found = files.read(Path(path), "--from")
    if not found.sites or not found.tokens:
        raise SettingError(f"--from: {path} has no tokens or no sites: there is nothing to draw.")
    return found


def edits(texts: Sequence[str], max_tokens: int) -> list[Edit]:
    """The edits that ``--edit`` gives.

    Args:
        texts: as of ``edit``.
        max_tokens: how long the answer may be.

    Raises:
        SettingError: there are too many, one says something else, or the answer is too long.
    """
    if len(texts) > MOST:
        raise SettingError(f"--edit is given {len(texts)} times; expected at most {MOST} times.")
    if texts:
        require_few_tokens(max_tokens, "--max-tokens", "--edit")
    return [edit(text) for text in texts]


def edit(text: str, name: str = "--edit") -> Edit:
    """The edit that ``--edit`` gives.

    Args:
        text: as ``ban sites=9,final sources="block 2" tokens=4:9``: a kind, ``scale=0.5`` or
            ``weights=0.5,0.5`` with its value, and the fields of the edit.
        name: what a sentence begins with.

    Raises:
        SettingError: it says something else.
    """
    try:
        kind, *fields = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        raise SettingError(f"{name}: {text!r} cannot be read; expected {_EDIT}.") from None
    found: dict[str, Any] = {}
    for field, _, value in (kind, *fields):
        if field in found or (field in KINDS) != (not found):
            raise SettingError(f"{name}: {field!r} stands where it cannot; expected {_EDIT}.")
        found[field] = _field(field, value)
    try:
        return Edit.model_validate(found)
    except ValidationError as error:
        place = str((*error.errors()[0]["loc"], kind[0])[0])
        if place not in _VALUES:
            raise SettingError(f"{name}: {place!r} is no field; expected {_EDIT}.") from None
        value = next(value for field, _, value in (kind, *fields) if field == place)
        raise SettingError(f"{name}: {place} is {value!r}; expected {_VALUES[place]}.") from None


_EDIT = (
    "ban, force, weights=0.5,0.5, mean or scale=2, then sites=9,final, sources='block 2' and "
    "tokens=4:9"
)
# What stands behind a field that pydantic may refuse.
_VALUES = dict.fromkeys(("ban", "force", "mean"), "the word alone, without a value") | {
    "weights": "numbers from 0 to 1 with commas between them, as weights=0.5,0.5",
    "scale": "a number from -1000 to 1000, as scale=2",
    "tokens": "positions from 0 on, as tokens=0,4, or a range of them, as tokens=4:9",
}


def _field(name: str, value: str) -> Any:
    """The value of a field of an edit, as a request has it."""
    parts = value.split(",")
    if name in ("ban", "force", "mean"):
        return value or True
    if name == "sites":
        return [int(part) if part.isdecimal() else part for part in parts]
    if name == "tokens" and ":" in value:
        start, _, end = value.partition(":")
        return {key: _number(at) for key, at in (("start", start), ("end", end)) if at}
    if name == "tokens":
        return [_number(part) for part in parts]
    return parts if name in ("sources", "weights") else value


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
