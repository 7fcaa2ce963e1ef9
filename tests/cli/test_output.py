"""What a command says apart from what libraries write, and what a library's failure leaves."""

import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import run
from serving import DEMO, ROOT

from attnres_serve import __main__, cli, output
from attnres_serve.errors import CheckpointError, SettingError

FOREIGN = "a line of a library"


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the logs."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """``libraries_hidden`` where Python's streams are those of the descriptors, as of a command."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for number, stream in enumerate(("stdout", "stderr"), 1):
            own = stack.enter_context(open(number, "w", 1, closefd=False))
            patch.setattr(sys, stream, own)
        with output.libraries_hidden(name):
            yield


WAYS: dict[str, Callable[[], object]] = {
    "print": lambda: print(FOREIGN),
    "stderr": lambda: sys.stderr.write(FOREIGN),
    "descriptor": lambda: os.write(2, FOREIGN.encode()),
    "child": lambda: subprocess.run(["echo", FOREIGN], check=True),
}


@pytest.mark.parametrize("write", WAYS.values(), ids=WAYS)
def test_a_library_is_not_heard_and_the_command_is(
    write: Callable[[], object], logs: Path, capfd: pytest.CaptureFixture
) -> None:
    with hidden("verify"):
        write()
        print("the answer", file=output.out())
        print("a remark", file=output.err())
    assert capfd.readouterr() == ("the answer\n", "a remark\n")
    assert list(logs.iterdir()) == []
    write()
    assert FOREIGN in "".join(capfd.readouterr())
    with output.libraries_hidden("verify", verbose=True):
        write()
    assert FOREIGN in "".join(capfd.readouterr())


TELLS = """
from attnres_serve.start import failures
with failures.reported():
    raise MemoryError("9 GiB are too many")
"""


def worker_failed() -> None:
    subprocess.run([sys.executable, "-c", TELLS], check=False)
    raise RuntimeError("Engine core initialization failed. See root cause above.")


def failed(error: BaseException) -> None:
    raise error


def say_and(fail: Callable[[], None]) -> None:
    print(FOREIGN)
    fail()


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda: failed(ValueError("no room\nfor it")), "ValueError: no room"),
        (worker_failed, "MemoryError: 9 GiB are too many"),
        (lambda: failed(AssertionError("word " * 100)), "word word"),
    ],
    ids=["two lines", "a worker's reason", "long"],
)
def test_a_failure_is_its_last_reason_and_a_log(
    fail: Callable[[], None], reason: str, logs: Path, capfd: pytest.CaptureFixture
) -> None:
    with pytest.raises(SettingError) as caught, hidden("inspect"):
        say_and(fail)
    said = str(caught.value)
    (log,) = logs.iterdir()
    assert said.startswith("inspect failed (") and reason in said and len(said) < 500
    assert said.endswith(f"; its log is {log}.")
    written = log.read_text()
    assert FOREIGN in written and "Traceback" in written
    assert capfd.readouterr() == ("", "")
    with (
        pytest.raises(SettingError, match="the reason stands above"),
        output.libraries_hidden("inspect", verbose=True),
    ):
        fail()
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    "refusal",
    [SettingError("a"), CheckpointError("b"), ModuleNotFoundError("c"), KeyboardInterrupt()],
    ids=repr,
)
def test_a_refusal_is_passed_on_and_leaves_no_log(refusal: BaseException, logs: Path) -> None:
    with pytest.raises(type(refusal)) as caught, hidden("bench"):
        say_and(lambda: failed(refusal))
    assert caught.value is refusal and list(logs.iterdir()) == []


def test_a_bar_is_for_a_terminal(capfd: pytest.CaptureFixture) -> None:
    """Elsewhere each of its descriptions is a line, once, with the seconds since the command."""
    with output.libraries_hidden("verify"), output.bar(total=3, desc="starting") as bar:
        for what in ("serving", "serving", "comparing"):
            bar.set_description(what)
            bar.update()
    out, err = capfd.readouterr()
    lines = [line.split(" s  ") for line in err.splitlines()]
    assert out == "" and [what for _, what in lines] == ["starting", "serving", "comparing"]
    assert sorted(lines, key=lambda line: float(line[0])) == lines


def test_a_terminal_without_columns_shows_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a container is given and nobody looks at."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with output.bar(total=1, desc="starting"):
            pass
        assert b" s  starting" in os.read(ours, 1000)
    os.close(ours)


def ended(folder: Path, *words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A command of ours that ran in a folder."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = (sys.executable, "-m", "attnres_serve", *words)
    return run(*words, status=status, cwd=folder, env=env, timeout=180)


def shadow(folder: Path, *modules: str) -> Path:
    for name in modules:
        (folder / f"{name}.py").write_text("raise SystemExit('another module')\n")
    return folder


MODULES = ("html", "json", "random")


def test_a_file_of_the_working_folder_shadows_no_module(tmp_path: Path) -> None:
    assert ended(shadow(tmp_path, *MODULES), "check", DEMO).stderr == ""


def test_nor_one_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(sys, "argv", ["attnres-serve", "--version"])
    with pytest.raises(SystemExit):
        __main__.main()
    command = [sys.executable, "-c", f"import {', '.join(MODULES)}"]
    assert subprocess.run(command, cwd=shadow(tmp_path, *MODULES), check=False).returncode == 0


def others(err: str) -> list[str]:
    """The lines that do not say what begins."""
    return [line for line in err.splitlines() if not re.match(r" *[\d.]+ s  \w", line)]


@pytest.mark.engine
@pytest.mark.exhaustive
def test_runs_that_go_well_say_nothing_of_libraries(tmp_path: Path) -> None:
    """In a folder whose files have names of modules."""
    folder = shadow(tmp_path, "html", "json", "random", "queue")
    done = ended(folder, "inspect", DEMO, "--prompt", "import os", "--out", "trace.json")
    assert done.stdout == "trace.json\n" and not others(done.stderr)
    done = ended(folder, "verify", DEMO, "--tokens", "8", "--passages", "1")
    assert not others(done.stderr)
    assert re.match(r"tokens compared +8\n", done.stdout)
    words = ("inspect", DEMO, "--prompt", "a", "--load-format", "none_such")
    done = ended(folder, *words, status=2)
    (said,) = others(done.stderr)
    assert done.stdout == ""
    assert "Load format `none_such` is not supported" in said
    log = Path(re.findall(r"its log is (\S+)\.$", said)[0])
    assert "Traceback" in log.read_text()
    log.unlink()


def test_a_command_that_fails_has_status_2(
    monkeypatch: pytest.MonkeyPatch, logs: Path, capfd: pytest.CaptureFixture
) -> None:
    """Of `verify` 1 means that a checkpoint does not hold."""
    rooms = {"inspect": "lens"}
    for name in ("verify", "bench", "inspect"):
        command = __import__(f"attnres_serve.{rooms.get(name, name)}.command", fromlist=["run"])
        monkeypatch.setattr(command, "run", lambda *_: failed(RuntimeError("no room")))
        assert cli.main([name, str(DEMO)]) == 2
        out, err = capfd.readouterr()
        assert not out and err.count("\n") == 1
        assert err.startswith(f"attnres-serve: {name} failed (RuntimeError: no room); its log is")
