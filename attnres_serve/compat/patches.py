"""The table of all patches of vLLM and torch, by their files.

``python docs/use/replaced.py`` writes docs/use/replaced.md from it.
"""

import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from attnres_serve.compat import versions, workarounds
from attnres_serve.compat.patch import Patch

# Modules outside ``workarounds`` that state a patch.
OTHERS = tuple(
    f"attnres_serve.compat.{name}"
    for name in ("changing_edits", "openai_app", "registry", "token_counts")
)


@cache
def table() -> dict[str, tuple[Patch, ...]]:
    """The patches by the names of their modules, in alphabetical order."""
    folder = pkgutil.iter_modules(workarounds.__path__, f"{workarounds.__name__}.")
    names = sorted((*(module.name for module in folder), *OTHERS))
    stated = {name: _stated(import_module(name)) for name in names}
    return {name: patches for name, patches in stated.items() if patches}


def _stated(module: ModuleType) -> tuple[Patch, ...]:
    patches: list[Patch] = []
    for value in vars(module).values():
        several = value if isinstance(value, tuple) else (value,)
        patches += [one for one in several if isinstance(one, Patch) and one not in patches]
    return tuple(patches)


def markdown() -> str:
    """The table in Markdown: a row for each file and reason."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for module, patches in table().items():
        for patch in patches:
            why = patch.why
            if patch.report:
                why += f" ([report](../build/upstream/{patch.report}.md))"
            file = f"`{module.rpartition('.')[2]}.py`"
            row = file, why, patch.models, _versions(patch)
            rows.setdefault(row, []).extend(_names(patch))
    head = "| what | file | why | for which models | for |\n|---|---|---|---|---|"
    lines = (f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items())
    return "\n".join((head, *lines))


def _names(patch: Patch) -> Iterator[str]:
    for target in patch.targets:
        module, _, path = target.rpartition(":")
        if patch.of:
            of = f"`{patch.of}`" if patch.of.startswith("vllm.") else patch.of
            yield f"`{path}` of {of}"
        else:
            yield f"`{path}`" if "." in path else f"`{module.rpartition('.')[2]}.{path}`"


def _versions(patch: Patch) -> str:
    library = {"vllm": "vLLM"}.get(patch.library, patch.library)
    first, last = versions.dotted(patch.first), patch.last and versions.dotted(patch.last)
    if last is None:
        return f"{library} {first} and later"
    return f"{library} {first}" if first == last else f"{library} {first} to {last}"
