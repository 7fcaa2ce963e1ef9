"""What is replaced is stated as data, applied once, and told where it cannot be."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from attnres_serve.compat import host, patch, patches, versions
from attnres_serve.compat.patch import Patch, place
from attnres_serve.errors import SettingError

pytest.importorskip("vllm")


SOURCE = """
class Thing:
    def name(self):
        return "own"

    @classmethod
    def kind(cls):
        return "own"

    @property
    def size(self):
        return 1


def call():
    return "own"
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of vLLM's of this version, with a class and a function."""
    module: Any = ModuleType("vllm.things")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "vllm.things", module)
    return module


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    patch._warn.cache_clear()
    monkeypatch.setattr(host.logger(), "propagate", True)
    with caplog.at_level(logging.WARNING):
        yield caplog


def of(*targets: str, make: Callable[[Any], Any] | None = None, **changes: Any) -> Patch:
    result = Patch(
        targets=tuple(f"vllm.things:{target}" for target in targets),
        make=make or (lambda own: lambda *given: f"more than {own(*given)}"),
        why="it is wrong",
        models="all",
        first=versions.OLDEST,
    )
    return replace(result, **changes)


def test_it_replaces_once(library: Any) -> None:
    result = of("Thing.name", "call")
    for _ in range(2):
        result.apply()
        assert library.Thing().name() == "more than own"
        assert library.call() == "more than own"


def test_what_somebody_undid_is_replaced_again(library: Any) -> None:
    own, result = library.call, of("call")
    result.apply()
    library.call = own
    result.apply()
    assert library.call() == "more than own"


def test_class_methods_and_properties(library: Any) -> None:
    of("Thing.kind", make=lambda own: classmethod(lambda cls: f"more than {own()}")).apply()
    of("Thing.size", make=lambda own: property(lambda self: own.fget(self) + 1)).apply()
    assert (library.Thing.kind(), library.Thing().size) == ("more than own", 2)


@pytest.mark.parametrize(
    ("first", "last", "installed", "is_due"),
    [
        ((0, 28), None, "0.28.1", True),
        ((0, 28), None, "0.40.0", True),
        ((0, 29), None, "0.28.0", False),
        ((0, 28), (0, 28), "0.28.3", True),
        ((0, 28), (0, 28), "0.29.0", False),
        ((0, 28), (0, 29), "0.29.0rc1", True),
    ],
)
def test_a_range_of_versions(
    library: Any, first: Any, last: Any, installed: str, is_due: bool, monkeypatch: Any
) -> None:
    """Outside of it nothing is asked of the library, which may lack the target."""
    monkeypatch.setattr(patch, "_version", lambda library: installed)
    result = of("call", first=first, last=last)
    assert result.is_due() is is_due
    result.apply()
    assert (library.call() == "own") is not is_due
    if not is_due:
        replace(result, targets=("vllm.things:no_such",)).apply()


@pytest.mark.parametrize("target", ["no_such", "Thing.no_such", "NoSuch.name"])
def test_a_missing_target(target: str, library: Any, said: Any, monkeypatch: Any) -> None:
    """An error in a version that was tested with it, and a warning, once, in another one."""
    result = of("call", target)
    named = f"found no vllm.things.{target} in vllm "
    with pytest.raises(SettingError, match=f"^{named}.*, which is replaced because it is wrong"):
        result.apply()
    major, minor = versions.NEWEST
    monkeypatch.setattr(patch, "_version", lambda library: f"{major}.{minor + 1}.0")
    for _ in range(2):
        result.apply()
    (record,) = said.records
    assert named in record.message
    assert library.call() == "more than own"


def test_a_module_that_is_gone(said: Any, monkeypatch: Any) -> None:
    with pytest.raises(SettingError, match=r"found no vllm\.nothing\.call in vllm"):
        of("call", targets=("vllm.nothing:call",)).apply()


def test_another_package_that_replaced_it_is_named(library: Any, said: Any) -> None:
    def other() -> str:
        return "other"

    other.__module__ = "other_plugin.patches"
    library.call = other
    of("call").apply()
    (record,) = said.records
    assert "vllm.things.call was replaced by the package other_plugin" in record.message


def test_objects_and_dictionaries() -> None:
    """Each call wraps what is there."""

    class Client:
        def generate(self) -> str:
            return "own"

    client, table = Client(), {"auto": None}
    result = of(targets=("generate",), of="a client", make=lambda own: lambda: f"more than {own()}")
    for _ in range(2):
        result.apply_to(client)
    assert client.generate() == "more than more than own"
    assert Client().generate() == "own"
    replace(result, targets=("auto",)).apply_to(table, lambda own: "ours")
    assert table == {"auto": "ours"}


@pytest.mark.versions
def test_the_installed_vllm_has_all_that_is_due() -> None:
    for patches_of_file in patches.table().values():
        for one in patches_of_file:
            assert one.first >= versions.OLDEST or one.library == "torch"
            if one.is_due() and not one.of:
                for target in one.targets:
                    place(target)
