"""Replacements of functions of vLLM or torch in a running process.

Each file of ``compat.workarounds`` states a ``Patch``: its targets, the replacement and the
versions.  ``compat.patches`` is the table of all; tests/compat/faults shows the faults.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from attnres_serve.compat import host, versions
from attnres_serve.compat.versions import Minor
from attnres_serve.errors import SettingError

# The replacement of each target, by its owner and name.
_applied: dict[tuple[int, str], Any] = {}


class Missing(Exception):
    """A library lacks a target; the text is the dotted name."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A replacement.

    Attributes:
        targets: dotted names in the form ``module:Class.attribute``, with one ``make`` for all;
            only attributes if ``of`` names the object.
        make: gives the replacement from the original; None if ``apply_to`` gets it, because it
            depends on the object.
        why: the fault without it, as the end of a sentence.
        models: the models to which it applies, for the page.
        first: the first version of the library to patch.
        last: the last one; None for all later versions.
        report: the file in docs/build/upstream/, without its suffix; None without a report.
        of: the object whose attributes are replaced, such as "one engine's client"; None for
            modules and classes.
    """

    targets: tuple[str, ...]
    make: Callable[[Any], Any] | None = None
    why: str
    models: str
    first: Minor
    last: Minor | None = None
    report: str | None = None
    of: str | None = None

    @property
    def library(self) -> str:
        """The package of the targets."""
        return "vllm" if self.of else re.split("[.:]", self.targets[0])[0]

    def is_due(self) -> bool:
        """Whether the installed version of the library needs it."""
        installed = versions.minor(_version(self.library))
        return self.first <= installed and (self.last is None or installed <= self.last)

    def apply(self) -> None:
        """Replace the targets if the installed version needs it (idempotent).

        Raises:
            SettingError: a tested version lacks a target.  An untested version only gets a
                warning.
        """
        if not self.is_due():
            return
        for target in self.targets:
            try:
                self._replace(target)
            except Missing as error:
                self._lacks(str(error))

    def apply_to(self, owner: Any, make: Callable[[Any], Any] | None = None) -> None:
        """Replace the targets of one object, by ``make`` if it depends on the object.

        Each call wraps the current value: several patches may have the same target.
        """
        for name in self.targets:
            _put(owner, name, make or self.make)

    def _replace(self, target: str) -> None:
        owner, name = place(target)
        current = _at(owner, name)
        key = id(owner), name
        if key in _applied and _applied[key] is current:
            return
        if name in vars(owner):  # otherwise it is inherited
            _tell_of_others(target, current)
        _put(owner, name, self.make)
        _applied[key] = _at(owner, name)

    def _lacks(self, name: str) -> None:
        version = _version(self.library)
        sentence = (
            f"found no {name} in {self.library} {version}, which is replaced because {self.why}"
        )
        if self.library == "vllm" and versions.minor(version) <= versions.NEWEST:
            raise SettingError(f"{sentence}; install {self.library} as it was released.")
        _warn(f"AttnRes: {sentence}: what it mends may be wrong.")


def _put(owner: Any, name: str, make: Callable[[Any], Any] | None) -> None:
    assert make is not None, "there is no replacement"
    if isinstance(owner, dict):
        owner[name] = make(owner.get(name))
    else:
        setattr(owner, name, make(getattr(owner, name)))


def place(target: str) -> tuple[Any, str]:
    """The object of a target, and the attribute's name.

    Raises:
        Missing: the module, class or attribute does not exist.
    """
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    try:
        thing: Any = import_module(module)
        for owner in owners:
            thing = getattr(thing, owner)
        _at(thing, name)
    except (ImportError, AttributeError):
        raise Missing(target.replace(":", ".")) from None
    return thing, name


def _at(owner: Any, name: str) -> Any:
    """The current value, not bound to its owner."""
    return vars(owner)[name] if name in vars(owner) else getattr(owner, name)


def _tell_of_others(target: str, current: Any) -> None:
    """Warn if another package replaced a target, because one replacement may undo the other."""
    made = getattr(current, "fget", None) or getattr(current, "__func__", current)
    home = str(getattr(made, "__module__", None) or target).partition(".")[0]
    if callable(made) and home not in (target.partition(".")[0], "attnres_serve", "builtins"):
        _warn(
            f"AttnRes: {target.replace(':', '.')} was replaced by the package {home} before it was "
            "by this one; each may undo the other."
        )


@cache
def _warn(sentence: str) -> None:
    host.logger().warning(sentence)


def _version(library: str) -> str:
    return str(import_module(library).__version__)
