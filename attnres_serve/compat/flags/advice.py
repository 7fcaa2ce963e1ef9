"""Suggestions for unknown flags."""

import argparse
import difflib
from collections.abc import Callable, Collection


def advice(flag: str, names: Collection[str], help_of: str = "serve --help=all") -> str:
    """The end of a sentence that suggests the nearest flag.

    Args:
        flag: the unknown flag.
        names: known flags, without the ``--no-`` forms of switches.
        help_of: the command that lists them.
    """
    no = "--no-" if flag.startswith("--no-") else "--"
    positive = flag.replace(no, "--", 1)
    longer = sorted(name for name in names if name.startswith(positive) and len(positive) > 2)
    turned = [name for name in names if name in _turned(positive)]
    near = longer[:1] or turned or difflib.get_close_matches(positive, names, n=1, cutoff=0.75)
    if near:
        if _turned(positive) and _turned(near[0]) and near[0][:5] != positive[:5]:
            no = "--" if no == "--no-" else "--no-"
        return f"which is no flag; did you mean {near[0].replace('--', no, 1)}?"
    return f"which is no flag; `attnres-serve {help_of}` lists those there are."


def names_of(add_arguments: Callable[[argparse.ArgumentParser], None]) -> set[str]:
    """The names of the flags that a function adds to a parser."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {name for action in parser._actions for name in action.option_strings}


def _turned(flag: str) -> list[str]:
    """The opposite of an --enable or --disable flag; empty for other flags."""
    on, off = "--enable-", "--disable-"
    swaps = ((on, off), (off, on))
    return [flag.replace(this, that, 1) for this, that in swaps if flag.startswith(this)]
