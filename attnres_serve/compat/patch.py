"""One function of vLLM's or torch's that takes another's place while a process runs.

Each file of ``compat.workarounds`` states its own as a ``Patch``: what it replaces, by what, and
for which versions.  The table of all is ``compat.patches``; tests/compat/faults shows the faults.
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

# What stands in the place of each target, by its owner and name.
_applied: dict[tuple[int, str], Any] = {}


class Missing(Exception):
    """A library has no such function; the text is the target's dotted name."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A replacement.

    Attributes:
        targets: dotted names in the form ``module:Class.attribute``, with one ``make`` for all;
            attributes alone where ``of`` names the object.
        make: gives what takes the place of the thing that it is given; None where ``apply_to`` is
            told, as it has to know the object.
        why: what is wrong without it, as the end of a sentence.
        models: for which models it is applied, as the page says it.
        first: the first version of the library that it is for.
        last: the last one; None for all that came since.
        report: the file in docs/build/upstream/, without its ending; None where there is no report.
        of: the one object whose attributes are replaced, such as "one engine's client"; None for
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
        """The package that has the targets."""
        return "vllm" if self.of else re.split("[.:]", self.targets[0])[0]

    def is_due(self) -> bool:
        """Whether the installed version of the library is among those that it is for."""
        installed = versions.minor(_version(self.library))
        return self.first <= installed and (self.last is None or installed <= self.last)

    def apply(self) -> None:
        """Replace the targets, where the installed version is one that it is for (idempotent).

        Raises:
            SettingError: a version that was tested with it has no such target.  One that was not
                serves on with a warning.
        """
        if not self.is_due():
            return
        for target in self.targets:
            try:
                self._replace(target)
            except Missing as error:
                self._lacks(str(error))

    def apply_to(self, owner: Any, make: Callable[[Any], Any] | None = None) -> None:
        """Replace the targets of one object, by ``make`` where that needs to know the object.

        Each call wraps what is there: several patches have one target.
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
    assert make is not None, "nothing says what takes the place"
    if isinstance(owner, dict):
        owner[name] = make(owner.get(name))
    else:
        setattr(owner, name, make(getattr(owner, name)))


def place(target: str) -> tuple[Any, str]:
    """The object that has a target, and the attribute's name.

    Raises:
        Missing: there is no such module, class or attribute.
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
    """What stands there, not bound to its owner."""
    return vars(owner)[name] if name in vars(owner) else getattr(owner, name)


def _tell_of_others(target: str, current: Any) -> None:
    """Warn if what stands at a target is another package's, whose mend may be lost or ours."""
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
