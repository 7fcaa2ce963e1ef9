"""Replacement classes for parts of a model whose classes vLLM's constructors fix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def swapped_classes(module: ModuleType, **classes: Callable[..., Any]) -> Iterator[None]:
    """Let the constructors of a module build these classes instead of the module's."""
    original = {name: getattr(module, name) for name in classes}
    vars(module).update(classes)
    try:
        yield
    finally:
        vars(module).update(original)
