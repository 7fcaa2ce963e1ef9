"""The file of ``--config``: a flag on every line, with or without underscores in its name.

Values mean the same as in vLLM, except that vLLM ignores some (``vllm serve --config`` drops
``false`` for a value, and for a switch with underscores in its name).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnres_serve.compat.flags import kinds, spelling
from attnres_serve.compat.flags.flag import ADAPTERS, APPEND, SWITCH, TEXT, Flag
from attnres_serve.compat.flags.stated import Stated, at
from attnres_serve.errors import SettingError

JSON = ("json", "json or text", "object")  # kinds with lists and keys
SWITCHED = "true or false"


class Value(NamedTuple):
    """A value as YAML reads it, and its text if it is a scalar."""

    read: Any
    text: str


def stated(path: str, flags: Sequence[Flag], takes_any: bool) -> list[Stated]:
    """The flags in a file.

    Args:
        path: of the file.
        flags: known flags.
        takes_any: whether to accept unknown flags, read like in vLLM.

    Raises:
        SettingError: it cannot be read, has a flag twice, or a value of the wrong kind.
    """
    rows = {word: flag for flag in flags for word in (*flag.spellings, *flag.off)}
    entries: list[Stated] = []
    lines: dict[str, tuple[int, bool]] = {}  # of flags, and whether they have a key after a dot
    for line, name, values in _content(path):
        place = f"{path}, line {line}"
        flag, _, key = name.partition(".")
        row = rows.get(flag)
        with at(place):
            dest = row.name if row else flag
            before, had_key = lines.setdefault(dest, (0, bool(key)))
            if before and not (key and had_key):
                raise SettingError(f"found {name} again, after line {before}; give it once.")
            lines[dest] = line, bool(key)
            if flag == spelling.CONFIG:
                raise SettingError(f"found {flag} in a file of flags; give it on the command line.")
            argv = _argv(name, row, values) if row or takes_any else [flag]
            entries.append(Stated(argv, place))
    return entries


def _content(path: str) -> Iterator[tuple[int, str, Value | list[Value]]]:
    """The line, the flag and the value or values of each key in a file."""
    import yaml  # comes with vLLM

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        loader.name = path  # for its error messages
        loader.yaml_implicit_resolvers = {  # dates stay text: libraries differ in reading them
            first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
            for first, rules in loader.yaml_implicit_resolvers.items()
        }
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            loader.flatten_mapping(root)  # merges by `<<`

        def value(node: yaml.Node) -> Value:
            text = node.value if isinstance(node, yaml.ScalarNode) else ""
            return Value(loader.construct_object(node, deep=True), text)

        entries = [
            (
                key.start_mark.line + 1,
                spelling.dashed(f"--{key.value}"),
                [value(one) for one in node.value]
                if isinstance(node, yaml.SequenceNode)
                else value(node),
            )
            for key, node in (root.value if isinstance(root, yaml.MappingNode) else ())
        ]
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"{spelling.CONFIG}: {path} cannot be read ({reason}).") from None
    if not entries:
        raise SettingError(
            f"{spelling.CONFIG}: {path} holds no flags; expected lines like `port: 8000`."
        )
    yield from entries


def _argv(name: str, flag: Flag | None, value: Value | list[Value]) -> list[str]:
    """The command-line arguments for a key of a file.

    Args:
        name: such as ``--port``, or ``--hf-overrides.rope_theta``.
        flag: its row; None for a flag that only vLLM knows.
        value: one value, or those of a list.

    Raises:
        SettingError: the value is invalid for the flag.
    """
    if "." in name or flag is None:
        return _of_vllm(name, value)
    if flag.action == SWITCH:
        return _switched(name, flag, value)
    if isinstance(value, list):
        return _listed(name, flag, value)
    if value.read is None:
        return [f"{name}=None"] if flag.is_optional else [name]
    return [f"{name}={_word(name, flag, value)}"]


def _of_vllm(name: str, value: Value | list[Value]) -> list[str]:
    read = [one.read for one in value] if isinstance(value, list) else value.read
    if "." in name:  # a key of a JSON object
        return [f"{name}={read if isinstance(read, str) else _json(read)}"]
    if isinstance(read, bool):
        return [name] if read else []
    if isinstance(read, list):
        return [name, *map(str, read)] if read else []
    return [name, _json(read) if isinstance(read, Mapping) else str(read)]


def _switched(name: str, flag: Flag, value: Value | list[Value]) -> list[str]:
    if isinstance(value, list) or not isinstance(value.read, bool):
        shown = "" if isinstance(value, list) else f" {value.text}".rstrip()
        raise SettingError(f"found {name}{shown}; expected {SWITCHED}.")
    if value.read:
        return [name]
    return [*(flag.spellings if name in flag.off else flag.off)[:1]]  # may be empty


def _listed(name: str, flag: Flag, values: list[Value]) -> list[str]:
    if flag.count is None and flag.kind in JSON:
        return [f"{name}={_json([one.read for one in values])}"]
    argv = [_word(name, flag, value) for value in values]
    if flag.action == APPEND:
        return [f"{name}={word}" for word in argv]
    if flag.count in (None, "?") and len(argv) > 1:
        raise SettingError(f"found {name} with {len(argv)} values; expected one.")
    return [name, *argv] if argv else []


def _word(name: str, flag: Flag, value: Value) -> str:
    """A single value as an argument; text stays as written, whatever YAML reads."""
    if isinstance(value.read, Mapping | list):
        if flag.kind in JSON or flag.action == ADAPTERS:
            return _json(value.read)
        raise SettingError(
            f"found {name} with more values inside; expected {kinds.expected(flag)}."
        )
    if value.read is None:
        return "None"
    if isinstance(value.read, bool):
        if flag.kind == TEXT and not flag.choices and value.text.lower() in ("true", "false"):
            raise SettingError(f"found {name} {value.text}; expected {kinds.expected(flag)}.")
        return value.text
    return value.text if flag.kind == TEXT else str(value.read)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
