"""A command line read by the flags that vLLM's parser has."""

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
    """What a command line holds, with the file of flags that it names and the environment.

    Attributes:
        values: of the flags that are given, by the names of their values.
        unknown: words that belong to no flag of the table.
        vllm_argv: those of vLLM's flags, as vLLM's parser takes them, but for the model.
        places: where flags are stated, of those that are not on the command line.
    """

    values: dict[str, Any]
    unknown: tuple[str, ...]
    vllm_argv: tuple[str, ...]
    places: dict[str, str]


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
    argv: Sequence[str],
    flags: Sequence[Flag],
    ours: Sequence[Flag] = (),
    environment: Mapping[str, str] | None = None,
    others: Collection[str] = (),
    takes_any: bool = False,
) -> CommandLine:
    """The values of a command line, of the file that ``--config`` names, and of variables.

    A flag on the command line replaces that of the file, which replaces that of a variable.  One
    that may be given several times, such as vLLM's ``--middleware``, adds to it instead.

    Args:
        argv: of flags, their values and nothing else.
        flags: that there are of vLLM's.
        ours: those that are not vLLM's.
        environment: variables, in which flags of ours may be stated; None to read none.
        others: names that a suggestion may name besides.
        takes_any: whether there may be more flags than those, which are left to vLLM.

    Raises:
        SettingError: vLLM would refuse the words; in one sentence, with the flag, what was found
            and what is expected, and the line of the file or the variable it stands in.
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
    """The words of stated flags that nothing replaces, and where the flags are stated.

    Args:
        layers: of stated flags; one in a layer replaces those of the layers after it.
        names: gives the flags of words, by the names of their values.
        overriding: flags that replace those of every layer.
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
    """Raise SettingError if a flag has no value that it takes; other words are not looked at."""
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
    """The values that words give to flags, and the words that belong to none."""
    try:
        namespace, unknown = parser.parse_known_args(spelling.usual(argv))
    except argparse.ArgumentError as error:
        raise SettingError(_misused(flags, error)) from None
    if unknown and not takes_any:
        raise SettingError(unknown_words(unknown, names))
    parsed = vars(namespace)
    values = {
        flag.name: kinds.value(flag, parsed[flag.name]) for flag in flags if flag.name in parsed
    }
    return values, unknown


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


def unknown_words(
    argv: Sequence[str], names: Collection[str], help_of: str = "serve --help=all"
) -> str:
    """The sentence for words that no flag takes, of which it names one.

    Args:
        argv: those.
        names: of the flags that there are.
        help_of: the command that lists them.
    """
    flag = next((word for word in argv if re.match("-{1,2}[A-Za-z]", word)), None)
    if flag is None:
        return (
            f"found {argv[0]!r}, which belongs to no flag; leave it out, or give the checkpoint "
            "once, right after the command."
        )
    name = re.split("[.=]", flag, maxsplit=1)[0]
    if name in names:  # of another command of ours, whose parser takes no underscores
        return f"found {name} with underscores in its name; write it with dashes."
    return f"found {name}, {advice(name, names, help_of)}"
