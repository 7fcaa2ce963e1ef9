"""How a process ended, in words."""

import signal

import pytest

from attnres_serve.start import ends, memory


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (128, "ended with status 128"),
        (-6, "was ended by signal 6 (SIGABRT)"),
        (128 + signal.SIGSEGV, "was ended by signal 11 (SIGSEGV)"),
        (-40, "was ended by signal 40"),  # of real time, without a name
    ],
)
def test_a_status_in_words(status, message):
    assert ends.how_it_ended(status) == message


@pytest.mark.parametrize(
    ("before", "now", "more"), [(2, 2, "0"), (2, 3, "1"), (None, 3, None), (2, None, None)]
)
def test_a_kill_may_be_for_want_of_memory(monkeypatch, before, now, more):
    """The control group's count says so, where there is one."""
    monkeypatch.setattr(ends, "_KILLS_BEFORE", before)
    monkeypatch.setattr(memory, "oom_kills", lambda: now)
    message = "was ended by signal 9 (SIGKILL), often the kernel's OOM killer"
    count = f" (OOM kills in its control group since the start: {more})" if more else ""
    assert ends.how_it_ended(-9) == ends.how_it_ended(128 + 9) == message + count
