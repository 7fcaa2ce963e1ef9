"""Classes of ours for parts of a model that vLLM's constructors name by themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def made_of(module: ModuleType, **classes: Callable[..., Any]) -> Iterator[None]:
    """Let the constructors of a module make these classes in the place of its own."""
    own = {name: getattr(module, name) for name in classes}
    vars(module).update(classes)
    try:
        yield
    finally:
        vars(module).update(own)
