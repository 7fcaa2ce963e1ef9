"""Fixtures of every test."""

import gc
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

# Engines run side by side here, and a thread that spins while it waits takes the core of another
# engine's.  Read by OpenMP when torch loads it, and by all that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from family_results import pytest_runtest_logreport, pytest_sessionfinish  # noqa: F401  # hooks
from torch import Tensor

from attnres_serve.compat import host

gc.disable()  # what collection makes, stays: looking for garbage in it takes a third of the time


def pytest_collection_finish() -> None:
    """Look for garbage again, and only in what tests make."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules that start engines first: one that began last would leave a process idle."""
    slow = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """What commands set for themselves, called within a test, ends with the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What we warn of, in the place of the log."""
    found: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: found.append(text % values))
    monkeypatch.setattr(host, "logger", lambda: logger)
    return found


@pytest.fixture
def unwritten() -> Iterator[Callable[..., None]]:
    """Remember tensors; at the end of the test they must hold what they held."""
    kept: list[tuple[Tensor, Tensor]] = []

    def watch(*tensors: Tensor) -> None:
        kept.extend((tensor, tensor.clone()) for tensor in tensors)

    yield watch
    assert kept, "nothing was watched"
    for tensor, before in kept:
        assert torch.equal(tensor, before), "an argument was written to"
