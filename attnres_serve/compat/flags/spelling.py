"""Normalising the spellings of a command line, like vLLM before argparse.

This follows ``vllm/utils/argparse_utils.py``, whose rules did not change from vLLM 0.28 to 0.33.
"""

import json
from collections.abc import Sequence
from typing import Any

from attnres_serve.compat.flags import kinds
from attnres_serve.errors import SettingError

CONFIG = "--config"  # names a file of flags
MODEL = "--model"
LEVEL = "--optimization-level"


def is_flag(word: str, flag: str) -> bool:
    """Whether an argument is a flag, with its value or without."""
    return word.partition("=")[0].replace("_", "-") == flag


def dashed(word: str) -> str:
    """An argument with dashes for underscores in the flag's name, but not in keys after dots.

    Other arguments, such as values, stay the same.
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    begin, dot, keys = name.partition(".")
    return begin.replace("_", "-") + dot + keys + equals + value


def usual(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes in names, ``-O3`` written out, and dotted keys as one JSON object."""
    spelled: list[str] = []
    for place, word in enumerate(argv):
        if word.startswith("-O") and word != "-O":
            spelled += [LEVEL, word[3:] if word[2] == "=" else word[2:]]
        elif word == "-O" and argv[place + 1 : place + 2] in (["0"], ["1"], ["2"], ["3"]):
            spelled.append(LEVEL)
        else:
            spelled.append(dashed(word))
    return _with_objects(spelled)


def _with_objects(argv: list[str]) -> list[str]:
    """Arguments with ``--flag.a.b 1`` as ``--flag {"a": {"b": 1}}``, after all others."""
    others: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if not (word.startswith("-") and "." in name):
            others.append(word)
            continue
        if not equals:
            value = next(rest, "")
        if name.endswith("+"):  # items of a list
            name, value = name[:-1], json.dumps(value.split(","))
        flag, *keys = name.split(".")
        nested: Any = _value(value)
        for key in reversed(keys):
            nested = {key: nested}
        _merge(objects.setdefault(flag, {}), nested)
    for flag, content in objects.items():
        others += [flag, json.dumps(content)]
    return others


def _value(word: str) -> Any:
    for read in (json.loads, kinds.count):
        try:
            return read(word)
        except ValueError:
            pass
    return word


def _merge(known: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        before = known.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            known[key] = before + value
        else:
            known[key] = value


def config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The file of ``--config``, empty without the flag, and the other arguments.

    Raises:
        SettingError: vLLM would fail on the flag.
    """
    places = [place for place, word in enumerate(argv) if word.partition("=")[0] == CONFIG]
    if not places:
        return "", [*argv]
    path = ([*argv][places[0] + 1 :] or [""])[0]
    if len(places) > 1 or "=" in argv[places[0]] or not path.endswith((".yaml", ".yml")):
        raise SettingError(
            f"found {' '.join(argv[places[0] :][:2])}; expected {CONFIG} FILE once, with a space "
            "before the name and a file that ends with .yaml."
        )
    return path, [*argv[: places[0]], *argv[places[0] + 2 :]]
