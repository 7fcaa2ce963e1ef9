"""Fixtures of every test."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from as_users import AS_USERS

# Engines run side by side here, and a thread that spins while it waits takes the core of another
# engine's.  Read by OpenMP when torch loads it, and by all that tests start.
if not AS_USERS:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import demo_servers
import pytest
import torch
from demo_servers import collector, keyed_server, open_server  # noqa: F401  # fixtures
from family_results import pytest_runtest_logreport, pytest_sessionfinish  # noqa: F401  # hooks
from on_file import (  # noqa: F401  # hooks and a fixture
    pytest_addoption,
    pytest_itemcollected,
    pytest_runtest_makereport,
    sentence,
)
from stand_in import served  # noqa: F401  # fixture
from torch import Tensor
from triton_interpreter import interpreter  # noqa: F401  # before anything imports Triton
from xdist.scheduler import LoadFileScheduling

from attnres_serve.compat import host

TESTS = Path(__file__).parent
# The shared server that a module asks, by the module's path.
SERVER_OF = {
    TESTS / module: name for name, modules in demo_servers.MODULES.items() for module in modules
}

gc.disable()  # what collection makes, stays: looking for garbage in it takes a third of the time


def pytest_collection_finish() -> None:
    """Look for garbage again, and only in what tests make.

    And seldom in all of that: what is imported later would be most of it.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 200)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first: one that began last would leave a process idle.

    That is modules that share a server, and then those that start engines.
    """
    slow = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: (item.path not in SERVER_OF, item.path not in slow))
    for item in items:
        asked = {*demo_servers.MODULES} & {*getattr(item, "fixturenames", ())}
        if asked and asked != {SERVER_OF.get(item.path)}:
            raise pytest.UsageError(f"{item.path} asks {asked}; name it in demo_servers.MODULES.")


class Scheduling(LoadFileScheduling):
    """A module's tests run in one process, and so do the modules that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        module = super()._split_scope(nodeid)
        return SERVER_OF.get(TESTS.parent / module, module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


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
