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

from attnres_serve.compat import host
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.start import engine_log, events, failures, record
from attnres_serve.start.ends import how_it_ended
from attnres_serve.start.engine_log import EngineLog

SPAWNED = multiprocessing.get_context("spawn").Process


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLog]:
    """A log that the processes of a test tell their events."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(record, "_held", {})  # of another log of this process
    log = EngineLog("test")
    with log.heard():
        yield log
    log.close()
    assert [*tmp_path.glob("attnres-test-*")] == []


def failed(log: EngineLog, *reported: tuple[int, str]) -> str | None:
    for pid, reason in reported:
        line = f'{{"event": "failed", "pid": {pid}, "reason": "{reason}"}}\n'
        os.write(log.pipe, line.encode())
    return log.reason


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        ([], None),
        ([(3, "no room"), (2, "a worker failed"), (1, "see above")], "no room"),
        ([(2, "no plugin"), (2, "no room"), (1, "see above")], "no room"),
        ([(1, "no plugin"), (2, "no plugin"), (2, "no room"), (1, "see above")], "no room"),
        ([(3, "no room"), (4, "peer is gone"), (2, "a worker failed")], "no room"),
    ],
)
def test_the_process_that_failed_first_tells_the_reason(log, reported, reason):
    assert failed(log, *reported) == reason
    assert log.reason == reason


def test_events_come_from_any_process_and_in_order(log):
    script = "from attnres_serve.start import events; events.tell('loaded', how='é')"
    events.tell("built")
    subprocess.run([sys.executable, "-c", script], check=True)
    events.tell("warm")
    result = log.events()
    assert [event["event"] for event in result] == ["built", "loaded", "warm"]
    assert result[1]["how"] == "é" and result[1]["pid"] != os.getpid()
    assert log.events() == []


class Unsupported(Exception):
    """An exception with a name like torch's."""


@pytest.mark.parametrize(
    ("error", "message"),
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
def test_a_reason_is_part_of_a_sentence(log, error, message):
    with pytest.raises(type(error)), failures.reported():
        raise error
    assert log.reason == message


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
    assert record.read() == {os.getpid(): "MemoryError: no room"}


def test_our_own_warnings_are_told(log):
    host.logger().info("of no matter")
    host.logger().warning("AttnRes: %s is slow", "it")
    host.logger().error("AttnRes: it failed")
    reported = [event["text"] for event in log.events() if event["event"] == "warning"]
    assert reported == ["AttnRes: it is slow", "AttnRes: it failed"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGILL, signal.SIGABRT])
def test_a_child_that_was_killed_is_named(log, number):
    child = SPAWNED(target=os.kill, args=(0, signal.SIG_DFL), name="VllmWorker-0")
    child.start()
    os.kill(child.pid, number)
    child.join()
    message = failures.reason_of(RuntimeError("cancelled"))
    assert message == f"VllmWorker-0 {how_it_ended(-number)}, and then RuntimeError: cancelled"


def test_a_child_that_was_killed_is_all_that_is_said_of_it(log):
    child = SPAWNED(target=signal.pause, name="VllmWorker-1")
    child.start()
    child.kill()
    child.join()
    failures.tell(Exception("WorkerProc initialization failed. See stack trace for root cause."))
    assert log.reason == f"VllmWorker-1 {how_it_ended(-9)}"


def test_children_that_were_stopped_are_not(log):
    children = [SPAWNED(target=sys.exit, args=(code,)) for code in (0, 1)]
    children.append(SPAWNED(target=signal.pause))
    for child in children:
        child.start()
    children[-1].terminate()
    for child in children:
        child.join()
    children[0].close()
    assert failures.reason_of(RuntimeError("cancelled")) == "RuntimeError: cancelled"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ""),
        ("\n \r\n", ""),
        ("a\nKeyError: 'x'\r\n\n", "KeyError: 'x'"),
        ("10%\r20%", "20%"),
    ],
)
def test_the_last_line_of_a_log(log, text, message):
    log.path.unlink()  # as those do that tidy up folders for temporary files
    log.write(text.encode())
    assert engine_log.last_line(log.content) == message


BEGIN = "Traceback (most recent call last):"
NO_FILES = "zmq.error.ZMQError: Too many open files (addr='inproc://x')"
TOLD_ELSEWHERE = [
    "Exception: WorkerProc initialization failed due to an exception in a background process. See "
    "stack trace for root cause",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): ",
    "RuntimeError: Worker failed with error 'x', please check the stack trace above for the root "
    "cause",
]


@pytest.mark.parametrize("referral", TOLD_ELSEWHERE)
def test_a_reason_that_is_elsewhere_is_looked_for(log, referral):
    """A worker without a free descriptor could tell nobody."""
    assert failed(log, (2, referral), (1, TOLD_ELSEWHERE[1])) == referral
    log.write(
        b"(EngineCore pid=2) WARNING 11-29 02:30:50 [a.py:1] Traceback of nobody\n"
        b"(Worker pid=3) ERROR 11-29 02:30:50 [a.py:1] Traceback (most recent call last):\n"
        b"(EngineCore pid=2) ERROR 11-29 02:30:50 [a.py:1] Traceback (most recent call last):\n"
        b'(Worker pid=3) ERROR 11-29 02:30:50 [a.py:1]   File "/a.py", line 1, in a\n'
        b"(EngineCore pid=2) ERROR 11-29 02:30:50 [a.py:1] " + referral.encode() + b"\n"
        b"(Worker pid=3) ERROR 11-29 02:30:50 [a.py:1]     b()\n"
        b"(Worker pid=3) ERROR 11-29 02:30:50 [a.py:1] " + NO_FILES.encode() + b"\n"
        b"Traceback (most recent call last):\n  File\nKeyError: later\n"
    )
    assert log.reason == NO_FILES
    assert failed(log, (4, "OSError: [Errno 98] Address already in use")) == (
        "OSError: [Errno 98] Address already in use"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ""),
        ("KeyError: without a traceback\n", ""),
        (f"{BEGIN}\n", ""),
        (f"{BEGIN}\n  File\n    a()\nOSError: no room\n", "OSError: no room"),
        (f"(W pid=3) {BEGIN}\n(W pid=3)   File\nnoise\n(W pid=3) A: b\n", "A: b"),
        (f"\u00fc\n{BEGIN}\n  File\nMemoryError\n", "MemoryError"),
    ],
)  # fmt: skip
def test_the_first_exception_of_a_log(text, message):
    assert engine_log.first_exception(text.encode()) == message


def test_a_process_without_a_free_descriptor_tells_it(log):
    """As workers do under a low `ulimit -n`."""
    script = (
        "import os, resource\n"
        "from attnres_serve.start import events, failures\n"
        "events.hold()\n"
        "events.hold()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1,) * 2)\n"
        "try:\n"
        "    os.pipe()\n"
        "except OSError as error:\n"
        "    failures.tell(error)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert log.reason == "OSError: [Errno 24] Too many open files"


def test_a_traceback_in_the_notes_of_an_exception_is_none_of_the_reason(log):
    """vLLM's workers put it there."""
    error = ValueError("No valid attention backend")
    error.add_note("Traceback (most recent call last):\n  File")
    failures.tell(error)
    assert log.reason == "ValueError: No valid attention backend"
    assert not log.is_ours


@pytest.mark.parametrize("error", [CheckpointError("It lacks a tensor."), SettingError("No.")])
def test_a_sentence_of_ours_is_known(log, error):
    failures.tell(error)
    assert log.reason == str(error).rstrip(".") and log.is_ours
    assert failed(log, (1, TOLD_ELSEWHERE[0])) == str(error).rstrip(".") and log.is_ours


def test_a_long_reason_ends_with_a_sentence():
    whole = (
        "ValueError: There is no room for it. " + "Its use is 0.5 of 1.5 GiB, as vLLM says. " * 9
    )
    message = engine_log.shortened(whole)
    assert message.startswith("ValueError: There is no room for it. Its") and len(message) <= 300
    assert message.endswith("as vLLM says")
