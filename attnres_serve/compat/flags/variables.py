"""Environment variables for our flags."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from attnres_serve.compat.flags.flag import SWITCH, Flag
from attnres_serve.compat.flags.stated import Stated, at
from attnres_serve.errors import SettingError

PREFIX = "ATTNRES_"
INTERNAL = "ATTNRES_SERVE_"  # the prefix of variables that `serve` sets for its processes
SWITCHED = {"1": True, "true": True, "0": False, "false": False}
# Variables that Kubernetes and Docker set for a Service with such a name.
SERVICE = re.compile(r"(_SERVICE_(HOST|PORT(_\w+)?)|_PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)$")
ADDRESS = re.compile(r"\w+://")  # the value with such a Service's whole address


def name_of(flag: str) -> str:
    """``ATTNRES_API_KEY_FILE`` for ``--api-key-file``, and ``ATTNRES_X`` for ``--attnres-x``."""
    return PREFIX + flag.removeprefix("--").upper().replace("-", "_").removeprefix(PREFIX)


def stated(
    ours: Sequence[Flag], variables: Mapping[str, str], names: Collection[str]
) -> list[Stated]:
    """The flags in variables.

    Args:
        ours: flags with a variable.
        variables: of the environment.
        names: of all flags, including vLLM's.

    Raises:
        SettingError: a variable belongs to no flag, or its value is invalid.
    """
    known = {name_of(flag.long): flag for flag in ours}
    entries = []
    for name, value in variables.items():
        if name in known:
            with at(name):
                entries.append(Stated(_argv(known[name], value), name))
        elif (
            name.startswith(PREFIX)
            and not name.startswith(INTERNAL)
            and not _of_service(name, value)
        ):
            raise SettingError(f"{name} is set, {_advice(name, known, names)}")
    return entries


def _argv(flag: Flag, value: str) -> list[str]:
    if not value.strip():
        raise SettingError("it is set and empty; give it a value or unset it.")
    if flag.action != SWITCH:
        return [f"{flag.long}={value}"]
    if (is_on := SWITCHED.get(value.lower())) is None:
        raise SettingError(f"found {value}; expected 1 or 0.")
    return [flag.long if is_on else flag.off[0]]


def _of_service(name: str, value: str) -> bool:
    match = SERVICE.search(name)
    return match is not None and (match[0] != "_PORT" or ADDRESS.match(value) is not None)


def _advice(name: str, known: Collection[str], names: Collection[str]) -> str:
    flags = {name_of(flag): flag for flag in names}
    if name in flags:
        return (
            f"and {flags[name]} is a flag of vLLM's, which has no variable; give it on the command "
            "line or in the file of --config."
        )
    ends = [one.removeprefix(PREFIX) for one in known]
    if near := difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.6):
        return f"which is no variable of `serve`; did you mean {PREFIX}{near[0]}?"
    return f"which is no variable of `serve`; unset it, or choose a name without {PREFIX}."
