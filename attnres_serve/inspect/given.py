"""Input of `attnres-serve inspect`: a prompt, edits, or a trace that was written before."""

import shlex
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attnres_serve.errors import SettingError
from attnres_serve.inspect.answer import Trace
from attnres_serve.inspect.edits import KINDS, Edit

STDIN = "-"


def prompt(text: str | None, file: str | None) -> str:
    """The prompt that ``--prompt`` or ``--prompt-file`` gives, one of which is ``-`` for stdin.

    The text of a file is taken as it is, a line break at its end included.

    Raises:
        SettingError: neither, both, an empty prompt, or one that cannot be read.
    """
    if (text is None) == (file is None):
        raise SettingError("give the prompt by --prompt TEXT or --prompt-file FILE, one of them.")
    source = "--prompt" if file is None else f"--prompt-file {file}"
    if STDIN in (text, file):
        source, text = "the standard input", _decoded(sys.stdin.buffer.read(), "stdin")
    elif file is not None:
        try:
            text = _decoded(Path(file).read_bytes(), file)
        except OSError as error:
            raise SettingError(f"--prompt-file: {file} cannot be read ({error}).") from None
    if not text:
        raise SettingError(f"{source} is empty; give some text.")
    return text


def trace(path: str) -> Trace:
    """A trace that ``--out FILE.json`` or the server's route wrote.

    Raises:
        SettingError: the file is none, or its numbers do not fit its tokens and sources.
    """
    try:
        found = Trace.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise SettingError(f"--from: {path} cannot be read ({error}).") from None
    except ValidationError:
        raise SettingError(
            f"--from: {path} is no trace; give a file that `inspect --out FILE.json` or POST "
            "/v1/attn_res/trace wrote."
        ) from None
    rows = len(found.tokens)
    for site in found.sites:
        tables = [*site.weights, *site.rms]
        whole = {len(site.weights), len(site.rms), len(site.entropy)} == {rows}
        if not whole or {len(row) for row in tables} - {len(site.sources)}:
            raise SettingError(
                f"--from: in {path} the numbers of site {site.index} do not fit its "
                f"{len(site.sources)} sources and the {rows} tokens; write the trace again."
            )
    if not found.sites or not rows:
        raise SettingError(f"--from: {path} has no tokens or no sites: there is nothing to draw.")
    return found


def edit(text: str) -> Edit:
    """The edit that ``--edit`` gives.

    Args:
        text: as ``ban sites=9,final sources="block 2" tokens=4:9``: a kind, ``scale=0.5`` or
            ``weights=0.5,0.5`` with its value, and the fields of the edit.

    Raises:
        SettingError: it says something else.
    """
    try:
        kind, *fields = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        raise SettingError(f"--edit: {text!r} cannot be read; expected {_EDIT}.") from None
    found: dict[str, Any] = {}
    for name, _, value in (kind, *fields):
        if name in found or (name in KINDS) != (not found):
            raise SettingError(f"--edit: {name!r} stands where it cannot; expected {_EDIT}.")
        found[name] = _field(name, value)
    try:
        return Edit.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:1]) or kind[0]
        reason = first["msg"].removeprefix("Value error, ")
        raise SettingError(f"--edit: {place}: {reason}; expected {_EDIT}.") from None


_EDIT = (
    "ban, force, weights=0.5,0.5, mean or scale=2, then sites=9,final, sources='block 2' and "
    "tokens=4:9"
)


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


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise SettingError(f"the prompt in {place} is not in UTF-8; convert it first.") from None
