"""Modules of a package of vLLM's whose ``__init__`` imports what this device cannot run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType


@contextmanager
def without_init(package: str) -> Iterator[None]:
    """Import modules of a package within the block, but not what its ``__init__`` does.

    The package itself is left to whoever imports it later, and as it is if somebody has.

    Args:
        package: its full name.

    Raises:
        ImportError: there is no such package.
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
