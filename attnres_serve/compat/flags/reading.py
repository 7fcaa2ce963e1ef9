"""Converting the flags of a parser, ours or vLLM's, to rows.

``python -m attnres_serve.compat.flags.reading`` prints the flags of the vLLM that Python imports,
as one JSON document.  The import takes seconds.
"""

import argparse
import json
import logging
from collections.abc import Callable, Container
from typing import Any

from attnres_serve.compat.flags import flag as rows
from attnres_serve.compat.flags.flag import Flag

# Kinds by the names of functions that read arguments; for lambdas by an example.
KINDS = {
    "str": rows.TEXT,
    "int": "integer",
    "positive": "positive",
    "natural": "natural",
    "float": "number",
    "loads": "json",
    "human_readable_int": "count",
    "human_readable_int_or_auto": "count or auto",
    "union_dict_and_str": "json or text",
    "parse_dataclass": "object",
}
UNNAMED = {("A-b", "a_b"): "lowered", ("1,b", (1, "b")): "devices"}


def read() -> list[Flag]:
    """The flags of vLLM's server, in the order of its parser."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine = EngineArgs.add_cli_args(FlexibleArgumentParser())
    of_engine = {action.dest for action in engine._actions}
    return of_parser(make_arg_parser(FlexibleArgumentParser()), of_engine)


def ours(add_arguments: Callable[[argparse.ArgumentParser], None]) -> tuple[Flag, ...]:
    """The flags that one of our functions adds to a parser."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return tuple(of_parser(parser))


def of_parser(parser: argparse.ArgumentParser, of_engine: Container[str] = ()) -> list[Flag]:
    """The flags of a parser, in its order.

    Args:
        parser: ours or vLLM's.
        of_engine: names of the values that an engine also has.
    """
    spellings: dict[int, list[str]] = {}  # an action may hide some
    for word, action in parser._option_string_actions.items():
        spellings.setdefault(id(action), []).append(word)
    return [
        _flag(action, spellings.get(id(action), []), action.dest in of_engine)
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    ]


def _flag(action: argparse.Action, spellings: list[str], of_engine: bool) -> Flag:
    kind, is_optional = _kind(action.type)
    made = {"_AppendAction": rows.APPEND, "LoRAParserAction": rows.ADAPTERS}
    is_switch = action.nargs == 0
    off = tuple(word for word in spellings if is_switch and not _turns_on(action, word))
    return Flag(
        spellings=tuple(word for word in spellings if word not in off),
        name=action.dest,
        off=off,
        action=rows.SWITCH if is_switch else made.get(type(action).__name__, rows.STORE),
        kind=rows.TEXT if is_switch else kind,
        is_optional=is_optional,
        count=action.nargs or None,
        alone=None if is_switch else action.const,
        choices=None if action.choices is None else tuple(action.choices),
        default=_plain(action.default),
        of_engine=of_engine,
    )


def _turns_on(action: argparse.Action, word: str) -> bool:
    """Whether a spelling of a switch turns it on; vLLM versions have different classes."""
    namespace = argparse.Namespace()
    action(argparse.ArgumentParser(), namespace, [], word)
    return bool(getattr(namespace, action.dest))


def _kind(read: Any) -> tuple[str | None, bool]:
    """The kind of a value, and whether ``None`` means no value."""
    name = getattr(read, "__name__", "str")
    if name in ("_optional_type", "_parse_type"):  # vLLM's, around another one
        (inner,) = (cell.cell_contents for cell in read.__closure__)  # type: ignore[union-attr]
        return _kind(inner)[0], name == "_optional_type"
    if name == "<lambda>":
        return next(
            (kind for example, kind in UNNAMED.items() if _makes(read, *example)), None
        ), False
    return KINDS.get(name), False


def _makes(read: Callable[[str], Any], word: str, value: Any) -> bool:
    try:
        result = read(word)
    except Exception:  # an unknown function may raise anything
        return False
    return (tuple(result) if isinstance(result, list) else result) == value


def _plain(value: Any) -> Any:
    """A default that is equal on every machine; None for others."""
    return value if type(value) in (str, int, float, bool) and value != argparse.SUPPRESS else None


if __name__ == "__main__":
    logging.disable()
    print(json.dumps([rows.to_row(flag) for flag in read()]))
