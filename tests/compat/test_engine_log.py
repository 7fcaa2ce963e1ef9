"""Why an engine failed, as its processes tell it and nobody has to read it out of a log."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnres_serve.compat import engine_log, failures, host, start_events
from attnres_serve.compat.engine_log import EngineLog
from attnres_serve.errors import CheckpointError


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLog]:
    """A log that the processes of a test tell their events."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = EngineLog("test")
    with log.heard():
        yield log
    log.close(keep=False)
    assert [*tmp_path.glob("attnres-test-*")] == []


def failed(log: EngineLog, *told: tuple[int, str]) -> str | None:
    for pid, reason in told:
        line = f'{{"event": "failed", "pid": {pid}, "reason": "{reason}"}}\n'
        os.write(log.pipe, line.encode())
    return log.reason


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([], None),
        ([(3, "no room"), (2, "a worker failed"), (1, "see above")], "no room"),
        ([(2, "no plugin"), (2, "no room"), (1, "see above")], "no room"),
        ([(1, "no plugin"), (2, "no plugin"), (2, "no room"), (1, "see above")], "no room"),
        ([(3, "no room"), (4, "peer is gone"), (2, "a worker failed")], "no room"),
    ],
)
def test_the_process_that_failed_first_tells_the_reason(log, told, reason):
    assert failed(log, *told) == reason
    assert log.reason == reason


def test_events_come_from_any_process_and_in_order(log):
    script = "from attnres_serve.compat import start_events as s; s.tell('loaded', how='é')"
    start_events.tell("built")
    subprocess.run([sys.executable, "-c", script], check=True)
    start_events.tell("warm")
    events = log.events()
    assert [event["event"] for event in events] == ["built", "loaded", "warm"]
    assert events[1]["how"] == "é" and events[1]["pid"] != os.getpid()
    assert log.events() == []


class Unsupported(Exception):
    """An exception with a name like torch's."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no room\n  for it"), "ValueError: no room for it"),
        (ValueError("No room."), "ValueError: No room"),
        (MemoryError(), "MemoryError"),
        (KeyError("x"), "KeyError: 'x'"),
        (Unsupported("a"), f"{__name__}.Unsupported: a"),
        (AssertionError("word " * 100), "AssertionError: " + "word " * 56 + "word"),
        (CheckpointError(f"{'a ' * 300}b."), f"{'a ' * 300}b"),
        (OSError("x" * 1000), f"OSError: {'x' * 291}"),
    ],
    ids=["two lines", "a sentence", "no words", "a key", "of a module", "long", "ours", "one word"],
)
def test_a_reason_is_part_of_a_sentence(log, error, said):
    with pytest.raises(type(error)), failures.told():
        raise error
    assert log.reason == said


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of vLLM's, told of in this process."""
    failures.tell_logged()
    failures.tell_logged()
    yield logging.getLogger("vllm.v1.any")
    logging.getLogger("vllm").removeHandler(failures._TELLER)


def test_an_exception_that_is_logged_as_an_error_is_told(log, logger):
    for write in (logger.error, logger.critical):
        write("of no exception")
        write("in an except of nothing", exc_info=True)
    logger.warning("recovered", exc_info=ValueError("recovered"))
    assert log.reason is None
    try:
        raise MemoryError("no room")
    except MemoryError:
        logger.exception("WorkerProc failed to start.")
    assert log.reason == "MemoryError: no room"


def test_our_own_warnings_are_told(log):
    host.logger().info("of no matter")
    host.logger().warning("AttnRes: %s is slow", "it")
    host.logger().error("AttnRes: it failed")
    told = [event["text"] for event in log.events() if event["event"] == "warning"]
    assert told == ["AttnRes: it is slow", "AttnRes: it failed"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGILL, signal.SIGABRT])
def test_a_child_that_was_killed_is_named(log, number):
    child = multiprocessing.get_context("spawn").Process(
        target=os.kill, args=(0, signal.SIG_DFL), name="VllmWorker-0"
    )
    child.start()
    os.kill(child.pid, number)
    child.join()
    said = failures.reason_of(RuntimeError("cancelled"))
    assert said == f"VllmWorker-0 was killed by signal {number:d}, and then RuntimeError: cancelled"


def test_children_that_were_stopped_are_not(log):
    method = multiprocessing.get_context("spawn")
    children = [method.Process(target=sys.exit, args=(code,)) for code in (0, 1)]
    for child in children:
        child.start()
    children.append(method.Process(target=signal.pause))
    children[-1].start()
    children[-1].terminate()
    for child in children:
        child.join()
    children[0].close()
    assert failures.reason_of(RuntimeError("cancelled")) == "RuntimeError: cancelled"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("\n \r\n", ""),
        ("a\nKeyError: 'x'\r\n\n", "KeyError: 'x'"),
        ("10%\r20%", "20%"),
    ],
)
def test_the_last_line_of_a_log(log, text, said):
    log.path.unlink()  # as those do that tidy up folders for temporary files
    log.write(text.encode())
    assert engine_log.last_line(log.content) == said
