"""Importing modules of a vLLM package whose ``__init__`` does not run on this device."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType


@contextmanager
def without_init(package: str) -> Iterator[None]:
    """Import modules of a package within the context, without running its ``__init__``.

    The package can still be imported later; if it already is, it is used.

    Args:
        package: its full name.

    Raises:
        ImportError: the package does not exist.
    """
    if package in sys.modules:
        yield
        return
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{package} is no package")
    bare = ModuleType(package)
    bare.__path__ = list(spec.submodule_search_locations)
    bare.__spec__ = spec
    sys.modules[package] = bare
    try:
        yield
    finally:
        del sys.modules[package]
