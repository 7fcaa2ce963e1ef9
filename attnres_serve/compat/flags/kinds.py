"""The kinds of values of vLLM's flags, read like in vLLM."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from attnres_serve.compat.flags.flag import ADAPTERS, SWITCH, Flag
from attnres_serve.errors import SettingError

DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Kind(NamedTuple):
    """A kind of values.

    Attributes:
        read: gives the value of an argument, or raises ValueError.
        expected: a description of valid arguments, as a part of a sentence.
    """

    read: Callable[[str], Any]
    expected: str


def count(word: str) -> int:
    """A number of tokens or bytes: ``4096``, ``4k``, ``4K``, ``25.6k``.

    Raises:
        ValueError: it is invalid; factors of 1024 need whole numbers.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", word.strip())
    if not match:
        return int(word)
    number, factor = match.groups()
    if factor in BINARY:
        return int(number) * BINARY[factor]
    return int(float(number) * DECIMAL[factor])


def count_or_auto(word: str) -> int:
    """A number like in ``count``, or -1 for ``auto``: as many as fit."""
    return -1 if word.strip().lower() in ("-1", "auto") else count(word)


def positive(word: str) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: it is none.
    """
    return _at_least(1, word)


def natural(word: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, word)


def _at_least(least: int, word: str) -> int:
    if (number := int(word)) < least:
        raise ValueError
    return number


def expand(text: str) -> str:
    """JSON with suffixes such as ``k`` and ``K`` of numbers resolved."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for place in range(0, len(parts), 2):  # outside of strings
        parts[place] = re.sub(
            r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda match: str(count(match[0])), parts[place]
        )
    return "".join(parts)


def _object(word: str) -> Any:
    if not isinstance(parsed := json.loads(expand(word)), dict):
        raise ValueError
    return parsed


def _json_or_text(word: str) -> Any:
    if not re.match(r"(?s)^\s*{.*}\s*$", word):
        return word
    return None if word in ("", "None") else json.loads(word)


def _lowered(word: str) -> str:
    return word.lower().replace("-", "_")


def _devices(word: str) -> list[int | str]:
    parts = (part.strip() for part in word.split(","))
    return [int(part) if part.isdigit() else part for part in parts]


REFUSED = object()
WHOLE = "a whole number"
KINDS = {
    "text": Kind(str, "a value"),
    "integer": Kind(int, WHOLE),
    "positive": Kind(positive, f"{WHOLE} of at least 1"),
    "natural": Kind(natural, f"{WHOLE} of at least 0"),
    "number": Kind(float, "a number"),
    "count": Kind(count, f"{WHOLE} such as 4096, 4k or 4K"),
    "count or auto": Kind(count_or_auto, f"{WHOLE} such as 4096, 4k or 4K, or auto"),
    "json": Kind(json.loads, "JSON"),
    "json or text": Kind(_json_or_text, "JSON or a name"),
    "object": Kind(_object, "a JSON object"),
    "lowered": Kind(_lowered, "a value"),
    "devices": Kind(_devices, "numbers of devices with commas between them"),
}


def expected(flag: Flag) -> str:
    """A description of a flag's valid values, as a part of a sentence."""
    if flag.choices:
        return f"one of {', '.join(str(choice) for choice in flag.choices if choice is not None)}"
    return KINDS[flag.kind].expected if flag.kind else "a value"


def value(flag: Flag, raw: Any) -> Any:
    """The value of a flag.

    Args:
        flag: the flag.
        raw: argparse's result: an argument, several, or a truth value.

    Raises:
        SettingError: vLLM would refuse it; the message has the flag, the value and the valid ones.
    """
    if flag.action == SWITCH:
        return raw
    if flag.action == ADAPTERS:
        return [_adapter(word) for word in raw if word not in ("", "None")]
    if isinstance(raw, list):
        return [_one(flag, word) for word in raw]
    return _one(flag, raw)


def _one(flag: Flag, word: Any) -> Any:
    if not isinstance(word, str):  # the value without an argument
        return word
    try:
        parsed = None if flag.is_optional and word in ("", "None") else _read(flag, word)
    except ValueError:
        parsed = REFUSED
    if parsed is REFUSED or (flag.choices and parsed not in flag.choices):
        raise SettingError(f"found {flag.long} {word or repr(word)}; expected {expected(flag)}.")
    return parsed


def _read(flag: Flag, word: str) -> Any:
    return KINDS[flag.kind].read(word) if flag.kind else word


def _adapter(word: str) -> dict[str, Any]:
    """An adapter's name and path, in vLLM's two notations."""
    name, equals, place = word.partition("=")
    if equals and "," not in word:
        return {"name": name, "path": place}
    try:
        written = json.loads(word)
        return {**written, "name": str(written["name"]), "path": str(written["path"])}
    except (ValueError, KeyError, TypeError):
        raise SettingError(
            f"found {word!r} after --lora-modules; expected NAME=FOLDER, or JSON such as "
            '{"name": "mine", "path": "FOLDER"}.'
        ) from None
