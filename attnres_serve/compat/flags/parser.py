"""Reading a command line by the flags of vLLM's parser."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

from attnres_serve.compat.flags import file, kinds, spelling, variables
from attnres_serve.compat.flags.advice import advice
from attnres_serve.compat.flags.flag import ADAPTERS, APPEND, SWITCH, Flag
from attnres_serve.compat.flags.stated import Stated, at
from attnres_serve.errors import SettingError

_Values = tuple[dict[str, Any], list[str]]


class CommandLine(NamedTuple):
    """The flags of a command line, its file of flags and the environment.

    Attributes:
        values: of the stated flags, by the names of their values.
        unknown: arguments of no known flag.
        vllm_argv: the arguments for vLLM's parser, without the model.
        places: the places of flags that are not on the command line.
    """

    values: dict[str, Any]
    unknown: tuple[str, ...]
    vllm_argv: tuple[str, ...]
    places: dict[str, str]


class _Parser(argparse.ArgumentParser):
    """An argparse parser that does not validate arguments.

    Abbreviations are not accepted, unlike in vLLM: another vLLM may resolve them differently.
    """

    def __init__(self, flags: Sequence[Flag]) -> None:
        super().__init__(
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(
                argparse.HelpFormatter, width=80
            ),  # argparse makes one for each flag
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
    argv: Sequence[str],
    flags: Sequence[Flag],
    ours: Sequence[Flag] = (),
    environment: Mapping[str, str] | None = None,
    others: Collection[str] = (),
    takes_any: bool = False,
) -> CommandLine:
    """The values of a command line, of its ``--config`` file, and of variables.

    A flag on the command line overrides the file, which overrides variables.  A repeatable flag,
    such as vLLM's ``--middleware``, adds to them instead.

    Args:
        argv: flags and their values, and nothing else.
        flags: vLLM's flags.
        ours: our flags.
        environment: variables that may state our flags; None to read none.
        others: further names for suggestions.
        takes_any: whether to leave unknown flags to vLLM.

    Raises:
        SettingError: vLLM would refuse the arguments; one sentence with the flag, the value, the
            valid ones, and the line of the file or the variable.
    """
    taken = {word for flag in ours for word in (*flag.spellings, *flag.off)}
    every = [*ours, *(flag for flag in flags if not taken & {*flag.spellings, *flag.off})]
    names = {word for flag in every for word in flag.spellings}
    parser = _parser(tuple(every))

    def values(argv: Sequence[str], names: Collection[str] = names) -> _Values:
        return _read(parser, every, argv, names, takes_any)

    path, rest = spelling.config(argv)
    on_line, _ = values(rest, {*names, *others})
    layers = [
        file.stated(path, every, takes_any) if path else [],
        variables.stated(ours, environment, names) if environment else [],
    ]
    may_repeat = {flag.name for flag in every if flag.action == APPEND}
    kept, places = _kept(layers, lambda argv: {*values(argv)[0]}, {*on_line}, may_repeat)
    whole = [*kept, *rest]
    parsed, unknown = values(whole, {*names, *others})
    apart = _parser((*ours, *(flag for flag in flags if spelling.MODEL in flag.spellings)))
    theirs = apart.parse_known_args([spelling.dashed(word) for word in whole])[1]
    return CommandLine(parsed, tuple(unknown), tuple(theirs), places)


def _kept(
    layers: Sequence[Sequence[Stated]],
    names: Callable[[Sequence[str]], set[str]],
    overriding: set[str],
    may_repeat: set[str],
) -> tuple[list[str], dict[str, str]]:
    """The arguments of stated flags that nothing overrides, and the places of these flags.

    Args:
        layers: of stated flags; earlier layers override later ones.
        names: gives the names of the values of arguments.
        overriding: flags that override those of every layer.
        may_repeat: flags that add to others.
    """
    kept: list[str] = []
    places: dict[str, str] = {}
    for layer in layers:
        held: list[str] = []
        for one in layer:
            with at(one.place):
                stated = names(one.argv)
            if stated <= may_repeat or not stated & overriding:
                held += one.argv
                places |= dict.fromkeys(stated - overriding, one.place)
        overriding = overriding | {*places}
        kept = held + kept
    return kept, places


def check(argv: Sequence[str], flags: Sequence[Flag]) -> None:
    """Raise SettingError if a flag has an invalid value; other arguments are ignored."""
    _read(_parser(tuple(flags)), flags, argv, (), takes_any=True)


@cache
def _parser(flags: tuple[Flag, ...]) -> _Parser:
    return _Parser(flags)


def _read(
    parser: _Parser,
    flags: Sequence[Flag],
    argv: Sequence[str],
    names: Collection[str],
    takes_any: bool,
) -> _Values:
    """The values of flags, and the arguments of no flag."""
    try:
        namespace, unknown = parser.parse_known_args(spelling.usual(argv))
    except argparse.ArgumentError as error:
        raise SettingError(_misused(flags, error)) from None
    if unknown and not takes_any:
        raise SettingError(unknown_arguments(unknown, names))
    parsed = vars(namespace)
    values = {
        flag.name: kinds.value(flag, parsed[flag.name]) for flag in flags if flag.name in parsed
    }
    return values, unknown


def _misused(flags: Sequence[Flag], error: argparse.ArgumentError) -> str:
    """The sentence for a flag without its value, or with a value for a switch."""
    if error.argument_name is None:  # several short flags in one, by Python's message
        return f"{error.message}; write the flag out."
    spellings = error.argument_name.split("/")
    flag = next(flag for flag in flags if {*flag.spellings, *flag.off} & {*spellings})
    if flag.action == SWITCH:
        ways = " or ".join((flag.long, *flag.off[:1]))
        return f"found {spellings[0]} with a value, which takes none; give {ways} alone."
    example = "NAME=FOLDER" if flag.action == ADAPTERS else kinds.expected(flag)
    return f"found {flag.long} without a value; expected {example}."


def unknown_arguments(
    argv: Sequence[str], names: Collection[str], help_of: str = "serve --help=all"
) -> str:
    """The sentence about the first of some unknown arguments.

    Args:
        argv: unknown arguments.
        names: of known flags.
        help_of: the command that lists them.
    """
    flag = next((word for word in argv if re.match("-{1,2}[A-Za-z]", word)), None)
    if flag is None:
        return (
            f"found {argv[0]!r}, which belongs to no flag; leave it out, or give the checkpoint "
            "once, right after the command."
        )
    name = re.split("[.=]", flag, maxsplit=1)[0]
    if name in names:  # another command of ours, whose parser accepts no underscores
        return f"found {name} with underscores in its name; write it with dashes."
    return f"found {name}, {advice(name, names, help_of)}"
