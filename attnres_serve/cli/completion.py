"""A script by which a shell completes commands and flags, vLLM's included.

The script is static: nothing of Python's runs when a key is pressed.
"""

import argparse
from collections.abc import Collection
from typing import Any

from attnres_serve.compat import source

SHELLS = ("bash", "zsh", "tcsh")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell.

    Args:
        parser: of the whole command; gets vLLM's flags too, so it is of no other use afterwards.
        shell: one of ``SHELLS``.

    Raises:
        ModuleNotFoundError: shtab is not installed.
    """
    import shtab

    (commands,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    server, engine = source.flags_of_server(), source.flags_of_engine()
    for name, flags in (("serve", server), ("bench", engine), ("inspect", engine)):
        commands[name].add_argument("checkpoint", nargs="?")
        _add_flags(commands[name], flags or ())
    places: list[Any] = [a for name in commands for a in commands[name]._actions]
    for place in places:
        if not place.option_strings:
            place.complete = shtab.DIRECTORY
    return shtab.complete(parser, shell)


def _add_flags(parser: argparse.ArgumentParser, flags: Collection[str]) -> None:
    """Add the flags that a parser does not have yet; short ones are typed without help."""
    for flag in sorted(flags):
        if flag.startswith("--") and flag not in parser._option_string_actions:
            parser.add_argument(flag, help="vLLM's")
