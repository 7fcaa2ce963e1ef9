"""The end of processes of multiprocessing without that of their interpreters."""

import sys

import pytest
from commands import run

from attnres_serve.start import quick_exit

TARGETS = """
import atexit, multiprocessing, sys, threading, time
from attnres_serve.start import quick_exit

class Slow:
    def __del__(self):
        time.sleep(20)

def work(seconds):
    time.sleep(seconds)
    print("worked", flush=True)

def target(how, seconds):
    quick_exit.instead_of_finalization()
    sys.kept = Slow()
    threading.Thread(target=work, args=(float(seconds),)).start()
    sys.exit(int(how))

if __name__ == "__main__":
    atexit.register(print, "bye")
    method, *arguments = sys.argv[1:]
    process = multiprocessing.get_context(method).Process(target=target, args=arguments)
    process.start()
    process.join(10)
    print(process.exitcode)
    process.kill()
"""


@pytest.mark.parametrize(
    ("method", "status", "seconds", "message"),
    [
        ("spawn", "0", "0", ["worked", "0", "bye"]),
        ("spawn", "3", "0.5", ["worked", "3", "bye"]),
        ("spawn", "0", "60", ["0", "bye"]),  # a thread that does not end
        ("fork", "0", "0.5", ["worked", "0", "bye"]),  # atexit is its parent's
    ],
)
def test_a_process_of_vllm_ends_without_finalization(tmp_path, method, status, seconds, message):
    script = tmp_path / "targets.py"
    script.write_text(TARGETS)
    said = run(sys.executable, script, method, status, seconds).stdout
    assert said.split() == message


def test_a_target_that_raises_ends_as_ever(monkeypatch):
    monkeypatch.setattr(quick_exit, "end_now", lambda status: pytest.fail("it raised"))
    try:
        raise KeyError("nothing")
    except KeyError:
        quick_exit._end_orderly()
