"""The table of what is replaced in vLLM and torch: each ``Patch`` by the file that states it."""

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

from attnres_serve.compat import workarounds
from attnres_serve.compat.patch import Patch

# Modules beside ``workarounds`` that state a patch.
OTHERS = tuple(
    f"attnres_serve.compat.{name}" for name in ("openai_app", "registry", "token_counts")
)


@cache
def table() -> dict[str, tuple[Patch, ...]]:
    """The patches by the names of their modules, in alphabetical order."""
    folder = pkgutil.iter_modules(workarounds.__path__, f"{workarounds.__name__}.")
    names = sorted((*(found.name for found in folder), *OTHERS))
    stated = {name: _stated(import_module(name)) for name in names}
    return {name: patches for name, patches in stated.items() if patches}


def _stated(module: ModuleType) -> tuple[Patch, ...]:
    found: list[Patch] = []
    for value in vars(module).values():
        several = value if isinstance(value, tuple) else (value,)
        found += [one for one in several if isinstance(one, Patch) and one not in found]
    return tuple(found)
