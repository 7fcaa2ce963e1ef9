"""A command line read by the flags that vLLM's parser has."""

import argparse
import re
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

from attnres_serve.compat.flags import kinds, spelling
from attnres_serve.compat.flags.advice import advice
from attnres_serve.compat.flags.flag import ADAPTERS, APPEND, SWITCH, Flag
from attnres_serve.errors import SettingError


class Found(NamedTuple):
    """What a command line holds.

    Attributes:
        values: of the flags that are given, by the names of their values.
        unknown: words that belong to no flag of the table.
    """

    values: dict[str, Any]
    unknown: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """argparse's, which gives words and judges none of them.

    Abbreviations, which vLLM takes, are none: they would be other flags with another vLLM.
    """

    def __init__(self, flags: Sequence[Flag]) -> None:
        super().__init__(
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(argparse.HelpFormatter, width=80),  # made for each flag
        )
        for flag in flags:
            if flag.action == SWITCH:
                self.add_argument(*flag.spellings, dest=flag.name, action="store_true")
                if flag.off:
                    self.add_argument(*flag.off, dest=flag.name, action="store_false")
            elif flag.action == APPEND:
                self.add_argument(*flag.spellings, dest=flag.name, action="append")
            elif flag.spellings:
                alone = {"const": flag.alone} if flag.count == "?" else {}
                self.add_argument(*flag.spellings, dest=flag.name, nargs=flag.count, **alone)

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}; write the flag out.")


def read(
    words: Sequence[str],
    flags: Sequence[Flag],
    others: Collection[str] = (),
    takes_any: bool = False,
) -> Found:
    """The values of a command line, and of the file that ``--config`` names.

    Args:
        words: of flags, their values and nothing else.
        flags: that there are.
        others: names that a suggestion may name besides.
        takes_any: whether there may be more flags than those, which are left to vLLM.

    Raises:
        SettingError: vLLM would refuse the words; in one sentence, with the flag, what was found
            and what is expected, and the file it stands in.
    """
    parser = _parser(tuple(flags))
    known = parser._option_string_actions
    path, of_file, rest = spelling.split(words, known)
    names = {word for flag in flags for word in flag.spellings}
    if of_file:
        try:
            _read(parser, flags, of_file, names, takes_any)
        except SettingError as error:
            raise SettingError(f"{path}: {error}") from None
    return _read(parser, flags, [*of_file, *rest], {*names, *others}, takes_any)


@cache
def _parser(flags: tuple[Flag, ...]) -> _Parser:
    return _Parser(flags)


def _read(
    parser: _Parser,
    flags: Sequence[Flag],
    words: Sequence[str],
    names: Collection[str],
    takes_any: bool,
) -> Found:
    try:
        given, unknown = parser.parse_known_args(spelling.usual(words))
    except argparse.ArgumentError as error:
        raise SettingError(_misused(flags, error)) from None
    if unknown and not takes_any:
        raise SettingError(_unknown(unknown, names))
    found = vars(given)
    values = {
        flag.name: kinds.value(flag, found[flag.name]) for flag in flags if flag.name in found
    }
    return Found(values, tuple(unknown))


def _misused(flags: Sequence[Flag], error: argparse.ArgumentError) -> str:
    """The sentence for a flag without its value, or with one that it does not take."""
    if error.argument_name is None:  # a short form of several, by the words of Python
        return f"{error.message}; write the flag out."
    spellings = error.argument_name.split("/")
    flag = next(flag for flag in flags if {*flag.spellings, *flag.off} & {*spellings})
    if flag.action == SWITCH:
        ways = " or ".join((flag.long, *flag.off[:1]))
        return f"found {spellings[0]} with a value, which takes none; give {ways} alone."
    example = "NAME=FOLDER" if flag.action == ADAPTERS else kinds.expected(flag)
    return f"found {flag.long} without a value; expected {example}."


def _unknown(words: Sequence[str], names: Collection[str]) -> str:
    """The sentence for words that no flag takes, of which it names one."""
    flag = next((word for word in words if re.match("-{1,2}[A-Za-z]", word)), None)
    if flag is None:
        return (
            f"found {words[0]!r}, which belongs to no flag; leave it out, or give the checkpoint "
            "once, right after the command."
        )
    name = re.split("[.=]", flag, maxsplit=1)[0]
    if name in names:  # of a command of ours, whose parser takes no underscores
        return f"found {name} with underscores in its name; write it with dashes."
    return f"found {name}, {advice(name, names)}"
