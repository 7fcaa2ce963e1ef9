"""Checkpoint formats: one file for each, with a ``FORMAT`` by which it is discovered."""

import importlib
import pkgutil
from collections.abc import Iterator

from attnres_serve.formats.format import Format


def _found() -> Iterator[Format]:
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        a_format = getattr(importlib.import_module(module.name), "FORMAT", None)
        if a_format is not None:
            yield a_format


SERVED = {a_format.name: a_format for a_format in sorted(_found(), key=lambda one: one.name)}
SUPPORTED = f"supported are the {len(SERVED)} formats of docs/use/formats.md"


def by_name(name: str) -> Format:
    """The format called ``name``."""
    return SERVED[name]
