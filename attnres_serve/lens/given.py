"""Input of `attnres-serve inspect`: a prompt, edits, or a trace that was written before."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attnres_serve import texts
from attnres_serve.depth import edit_words
from attnres_serve.depth.edits import MOST, Edit, require_few_tokens
from attnres_serve.errors import SettingError
from attnres_serve.lens import files
from attnres_serve.tracing.answer import TraceAnswer

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


def data(path: str) -> list[str]:
    """The texts of ``--data``, each the ``text`` of an object in a line.

    Raises:
        SettingError: the file cannot be read, or a line is something else.
    """
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # a text may have other line breaks
        found = [json.loads(line)["text"] for line in lines if line]
        if not found or not all(isinstance(text, str) and text for text in found):
            raise ValueError("a text is missing")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f'--data: {path} has no texts ({error}); expected lines as {{"text": "import os"}}.'
        ) from None


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
        texts: as of ``edit_words.read``.
        max_tokens: how long the answer may be.

    Raises:
        SettingError: there are too many, one says something else, or the answer is too long.
    """
    if len(texts) > MOST:
        raise SettingError(f"--edit is given {len(texts)} times; expected at most {MOST} times.")
    if texts:
        require_few_tokens(max_tokens, "--max-tokens", "--edit")
    return [edit_words.read(text) for text in texts]
