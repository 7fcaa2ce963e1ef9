"""Limits of the length of sentences on a terminal or in an answer, and amounts in them."""

import re
import tempfile
from collections.abc import Iterable, Mapping

MOST = 560  # letters; with a command's name before it, a line has at most 600
FEW = 12  # names of a list
DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
BINARY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_LONG_WORD = re.compile(r"(\S{100})\S{20,}")


def cut(text: str, rest: str, room: int = MOST) -> str:
    """A text, shortened at a word to fit; very long words are shortened too.

    Args:
        text: one sentence, or a part of one.
        rest: the place of the whole text, as a part of a sentence.
        room: letters.
    """
    if len(text) <= room:
        return text
    end = f" (cut from {len(text)} letters; {rest})"
    short, most = _LONG_WORD.sub(r"\1[...]", text), max(0, room - len(end))
    if len(short) > most:
        short = short[: most + 1].rpartition(" ")[0]
    return short + end


def between(begin: str, reason: str, end: str) -> str:
    """A sentence of three parts, with its reason shortened to fit.

    Args:
        begin: the first part.
        reason: the middle, which a log has too.
        end: the last part, which names that log.
    """
    return begin + cut(reason, "the log has the whole", MOST - len(begin + end)) + end


def for_terminal(text: str) -> str:
    """A sentence, shortened to fit, with the whole text in a file."""
    if len(text) <= MOST:
        return text
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="attnres-", suffix=".log", delete=False, errors="backslashreplace"
        ) as file:
            file.write(text + "\n")
    except OSError:
        return cut(text, "no file could be written for the rest")
    return cut(text, f"the whole is in {file.name}")


def some(names: Iterable[object]) -> str:
    """The first names of a list, with the number of others, for a sentence."""
    all_names = [str(name) for name in names]
    listed = ", ".join(all_names[:FEW])
    more = len(all_names) - FEW
    return f"{listed} and {more} more" if more > 0 else listed


def capital(text: str) -> str:
    """A text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def amount(size: int, units: Mapping[str, int] = DECIMAL) -> str:
    """Bytes in the largest unit that they fill, or in the smallest one."""
    smallest = min(units, key=units.__getitem__)
    unit = next((unit for unit, factor in units.items() if size >= factor), smallest)
    return f"{size} B" if unit == "B" else f"{size / units[unit]:.1f} {unit}"
