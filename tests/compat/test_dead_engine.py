"""Why an engine ended, as its server tells clients: by a signal, by its own words, by a status."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnres_serve.compat.workarounds import dead_engine
from attnres_serve.start import record
from attnres_serve.start.ends import how_it_ended
from attnres_serve.start.engine_log import EngineLog

FULL = "OSError: [Errno 28] No space left on device"
REFERS = "RuntimeError: Worker failed with error 'x', please check the stack trace above"
TELLS = "from attnres_serve.start import record; record.write({!r})"
ENGINE = 10**7  # no process has this id


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(record, "_held", {})  # of another log of this process
    log = EngineLog("test")
    with log.heard():
        yield
    log.close()


def asked(monkeypatch: pytest.MonkeyPatch, *engines: tuple[str, int | None]) -> str | None:
    """The cause that a client's engines have, by names and exit codes; the last one failed."""
    processes = [
        SimpleNamespace(name=name, exitcode=code, pid=ENGINE - at)
        for at, (name, code) in enumerate(engines)
    ]
    manager = SimpleNamespace(processes=processes, failed_proc_name=engines[-1][0])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    monkeypatch.setattr(dead_engine, "_client", SimpleNamespace(engine_core=core))
    return dead_engine.cause()


def told(monkeypatch: pytest.MonkeyPatch, *reasons: tuple[int, str]) -> None:
    """What processes have kept of why they failed."""
    for pid, reason in reasons:
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda pid=pid: pid)
            record.write(reason)


@pytest.mark.parametrize(
    ("code", "kept", "message"),
    [
        (-9, [], "was ended by signal 9 (SIGKILL), often the kernel's OOM killer"),
        (-9, [(ENGINE, "KeyError: 'of an hour ago'")], "was ended by signal 9 (SIGKILL)"),
        (-11, [], "was ended by signal 11 (SIGSEGV)"),
        (1, [(ENGINE, FULL)], f"failed: {FULL}"),
        (None, [(ENGINE, "KeyError: 1"), (ENGINE, FULL)], f"failed: {FULL}"),  # it is ending
        (1, [(5, FULL), (ENGINE, REFERS)], f"failed: {FULL}"),
        (1, [(ENGINE, REFERS)], f"failed: {REFERS}"),
        (1, [(5, "of another process")], "ended with status 1"),
        (3, [], "ended with status 3"),
        (0, [], "ended with status 0"),
    ],
)
def test_the_cause_of_a_dead_engine(monkeypatch, heard, code, kept, message) -> None:
    told(monkeypatch, *kept)
    cause = asked(monkeypatch, ("EngineCore", code))
    assert cause is not None and cause.startswith(f"the engine {message}")
    sentence = dead_engine.sentence()
    assert sentence.startswith(f"The engine {message}") and sentence.endswith(dead_engine.ADVICE)


def test_of_several_engines_the_one_that_failed_is_named(monkeypatch, heard) -> None:
    """Others are stopped when it is gone."""
    cause = asked(monkeypatch, ("EngineCore_DP0", -15), ("EngineCore_DP1", -9))
    assert cause == f"the engine {how_it_ended(-9)}"


def test_an_engine_that_runs_or_is_another_process_has_no_cause(monkeypatch, heard) -> None:
    assert asked(monkeypatch, ("EngineCore", None)) is None
    monkeypatch.setattr(dead_engine, "_client", SimpleNamespace())
    assert dead_engine.cause() is None
    assert dead_engine.sentence() == f"The engine has ended{dead_engine.ADVICE}"


def test_a_long_reason_keeps_its_advice(monkeypatch, heard) -> None:
    """By which the answer has its status."""
    told(monkeypatch, (ENGINE, "no room " * 200))
    asked(monkeypatch, ("EngineCore", 1))
    assert dead_engine.sentence().endswith(dead_engine.ADVICE)
    assert len(dead_engine.sentence()) < 600


def test_the_record_is_read_by_any_process_and_holds_what_is_new(heard) -> None:
    for reason in ("no room", FULL):
        subprocess.run([sys.executable, "-c", TELLS.format(reason)], check=True)
    assert [*record.read().values()] == ["no room", FULL]
    for number in range(3000):
        record.write(f"number {number} {'x' * 100}")
    assert record.read()[os.getpid()].startswith("number 2999 ")
    assert len(record.read()) == 1


@pytest.mark.parametrize("path", ["", "/dev/null", "/proc/self/fd/0", f"/proc/{10**8}/fd/3"])
def test_without_a_record_nothing_is_kept(monkeypatch, path: Any) -> None:
    monkeypatch.setenv(record.VARIABLE, path)
    record.write("no room")
    assert record.read() == {}


def test_a_path_that_became_another_file_is_left_alone(monkeypatch, tmp_path) -> None:
    """Whoever made the record is gone, and another process has its number."""
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setenv(record.VARIABLE, f"/proc/{os.getpid()}/fd/{file.fileno()}")
        record.write("no room")
    assert (tmp_path / "file").read_text() == ""
