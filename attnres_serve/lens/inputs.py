"""Inputs of `attnres-serve inspect`: a prompt, or texts."""

import json
import sys
from pathlib import Path

from attnres_serve import texts
from attnres_serve.errors import SettingError

STDIN = "-"


def prompt(text: str | None, file: str | None) -> str:
    """The prompt of ``--prompt`` or ``--prompt-file``, either of which may be ``-`` for stdin.

    The text of a file is used unchanged, including a final line break, but without a byte order
    mark.

    Args:
        text: the value of ``--prompt``.
        file: the value of ``--prompt-file``.

    Raises:
        SettingError: there is neither or both, or the prompt is empty or cannot be read.
    """
    if (text is None) == (file is None):
        raise SettingError("give the prompt by --prompt TEXT or --prompt-file FILE, one of them.")
    source = "--prompt" if file is None else f"--prompt-file {file}"
    if STDIN in (text, file):
        content = sys.stdin.buffer.read()
        source, text = "the standard input", texts.decoded(content, "the prompt in stdin")
    elif text is not None:  # Python's surrogates stand for invalid bytes
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
    """The texts of ``--data``: the value of ``text`` in the JSON object of each line.

    Raises:
        SettingError: the file cannot be read, or a line has no text.
    """
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # a text may have other line breaks
        values = [json.loads(line)["text"] for line in lines if line]
        if not values or not all(isinstance(text, str) and text for text in values):
            raise ValueError("a text is missing")
        return values
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f'--data: {path} has no texts ({error}); expected lines as {{"text": "import os"}}.'
        ) from None
