"""Texts of a server's processes that no logger wrote: warnings, last words and tracebacks."""

import re
from collections.abc import Sequence

from attnres_serve.compat.log_lines import is_pointer

# Warnings that no logger of vLLM's wrote: Python's, and those of torch in C++ and in Python.
_WARNING = re.compile(
    r"^\S.*?:\d+: \w*Warning: (.*)|^(?:\[\w+\]:)?\[?W\d{4} [\d:.]+ (?:\d+ )?\S+\] (.*)"
)
# Written by libraries as an interpreter ends; nothing of it is a fault of the server's.
_LAST_WORDS = re.compile(
    r"^nanobind: (?:leaked \d|this is likely caused)|^See https://nanobind\."
    r"|^ - leaked \w|^ - \.\.\. skipped"
    r"|^\S*/multiprocessing/resource_tracker\.py:\d+: UserWarning: "
    r"|^  warnings\.warn\((?:'resource_tracker: .*)?$"
)


def warning(text: str) -> str | None:
    """The warning in a text that no logger wrote; None if it is not one."""
    found = _WARNING.match(text)
    return (found[1] or found[2]) if found and not are_last_words(text) else None


def are_last_words(text: str) -> bool:
    """True if a library wrote it because its interpreter ended."""
    return bool(_LAST_WORDS.match(text))


def without_pointers(texts: Sequence[str]) -> list[str]:
    """The texts without the tracebacks of exceptions that only point at another one."""
    kept: list[str] = []
    begin = 0
    for text in texts:
        if text.startswith("Traceback"):
            begin = len(kept)
        kept.append(text)
        if is_pointer(text):
            del kept[begin:]
        if not text[:1].isspace() and not text.startswith("Traceback"):
            begin = len(kept)
    return kept
