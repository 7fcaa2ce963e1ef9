"""Libraries that the command begins again with."""

import os
import sys
from pathlib import Path

import pytest

from attnres_serve.compat import device
from attnres_serve.compat.device import Kind
from attnres_serve.server.start import preload


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """What the command begins again with, on a machine with both libraries."""
    found = []
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / preload.OPENMP).touch()
    (tmp_path / preload.ALLOCATORS[1]).touch()
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(preload, "FOLDERS", (tmp_path / "nowhere", tmp_path))
    monkeypatch.setattr(preload.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    monkeypatch.setattr(os, "execve", lambda *arguments: found.append(arguments))
    return found


def test_libraries_are_preloaded(begun, tmp_path):
    preload.begin_again_with_libraries()
    ((program, words, variables),) = begun
    assert words == [program, *sys.orig_argv[1:]] and program == sys.executable
    assert variables["LD_PRELOAD"].split(":") == [
        str(tmp_path / preload.ALLOCATORS[1]),
        str(tmp_path / "lib" / preload.OPENMP),
    ]


@pytest.mark.parametrize("given", ["", "/some/library.so"])
def test_a_given_preload_is_kept(begun, monkeypatch, given):
    monkeypatch.setenv("LD_PRELOAD", given)  # which is also how it does not begin a third time
    preload.begin_again_with_libraries()
    assert not begun


def test_it_begins_again_once_where_the_variable_is_dropped(begun, monkeypatch):
    """As the loader drops it in an interpreter with more rights than its user."""
    preload.begin_again_with_libraries()
    monkeypatch.setenv(preload.BEGUN, begun[0][2][preload.BEGUN])
    preload.begin_again_with_libraries()
    assert len(begun) == 1
    assert preload.BEGUN not in os.environ  # of what the server starts


def test_nothing_is_preloaded_where_there_is_nothing(begun, monkeypatch, tmp_path):
    monkeypatch.setattr(preload.sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(preload, "FOLDERS", ())
    preload.begin_again_with_libraries()
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    monkeypatch.setattr(preload, "libraries", lambda: [Path("found.so")])
    preload.begin_again_with_libraries()
    assert not begun
