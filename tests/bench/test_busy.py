"""``attnres-serve bench --quick`` on a busy machine: no ratio that is not believed."""

import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from serving import DEMO

from attnres_serve.bench import busy, process, report, session
from attnres_serve.bench.overhead import half_width
from attnres_serve.cli import main
from tests.bench.test_bench import SCHEMA, Started, document, facts

QUIET = 0.02


def trial(*reach: float) -> dict[str, Any]:
    """The document of a trial, its intervals of prefill and decode reaching so far."""
    made = document(1.02) | {"quick": True}
    for phase, far in zip(made["overhead"].values(), reach, strict=True):
        phase["ci95"] = [phase["ratio"] * (1 - far), phase["ratio"] * (1 + far)]
    return made


def test_a_quiet_machine_is_believed():
    found = busy.judge(trial(0.01, 0.04), QUIET)
    jsonschema.validate(found, SCHEMA)
    assert found["trust"]["believed"] == {"prefill": True, "decode": True}
    assert found["trust"]["spread"] == pytest.approx({"prefill": 0.01, "decode": 0.04})
    shown = report.render(found)
    assert shown.count("AttnRes takes 1.02 (") == 2 and "No ratio" not in shown


def test_a_phase_whose_rounds_scatter_has_no_ratio():
    made = trial(0.01, 0.06)
    found = busy.judge(made, QUIET)
    jsonschema.validate(found, SCHEMA)
    assert found["trust"]["believed"] == {"prefill": True, "decode": False}
    assert found["overhead"]["decode"] is None
    assert found["overhead"]["prefill"] == made["overhead"]["prefill"]
    prefill, decode = (row["engines"]["attnres"] for row in found["cells"])
    assert "ratio" in prefill and not busy.RATIOS & decode.keys() and decode["rounds_s"]
    shown = report.render(found)
    assert shown.count("AttnRes takes") == 1 and "decode   A trial" not in shown
    for words in ("No ratio is given for decode", "reached 6.0% in decode", "where 5% are allowed"):
        assert words in shown


def test_a_control_that_scatters_is_a_busy_machine():
    control = trial(0.2, 0.01)["overhead"]
    found = busy.judge(trial(0.01, 0.01) | {"control": control}, QUIET)
    jsonschema.validate(found, SCHEMA)
    assert found["overhead"]["prefill"] is None and found["control"]["prefill"] is None
    assert found["control"]["decode"] is not None


def test_no_ratio_is_told_of_a_machine_that_was_busy_before():
    found = busy.judge(trial(0.001, 0.001), 0.3)
    jsonschema.validate(found, SCHEMA)
    assert found["overhead"] == {"prefill": None, "decode": None}
    shown = report.render(found)
    assert "AttnRes takes" not in shown and "1.020" not in shown
    assert "Other processes took 30% of the cores before the start, where 10% are allowed" in shown
    assert "Every engine was started once" not in shown  # it is of intervals, and there are none


def test_a_busy_machine_is_told_of_and_a_quiet_one_is_not():
    assert busy.warning(busy.MOST_LOAD) is None
    said = busy.warning(0.42)
    assert said.startswith("This machine is busy: other processes take 42% of the cores")


def test_load_is_what_others_take_of_this_process_s_cores(monkeypatch):
    """By what Linux counts: idle cores, of those that this process may use."""
    idle = {0: [10.0, 10.5], 1: [20.0, 21.0], 2: [30.0, 30.0]}  # seconds, before and after one
    looks, now = iter((0, 1)), iter((100.0, 101.0))

    def cpu_times(percpu: bool) -> list[Any]:
        look = next(looks)
        return [SimpleNamespace(idle=times[look], iowait=0.0) for times in idle.values()]

    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None)
    monkeypatch.setattr(busy, "time", clock)
    monkeypatch.setattr(busy, "psutil", SimpleNamespace(cpu_times=cpu_times))
    monkeypatch.setattr(busy, "os", SimpleNamespace(sched_getaffinity=lambda process: {0, 1}))
    assert busy.load_of_others(1.0) == pytest.approx(0.25)


def test_load_counts_a_process_that_spins():
    """For real: a process on one of the cores takes at least half of that core's time."""
    core = min(busy.os.sched_getaffinity(0))
    script = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    cores = len(busy.os.sched_getaffinity(0))
    try:
        spinning.stdout.readline()
        assert busy.load_of_others(1.0) > 0.5 / cores
    finally:
        spinning.kill()
        spinning.communicate()


class Whole(Started):
    """An engine that tells all that a document has of it."""

    def ask(self, what: str, **arguments: Any) -> Any:
        if what != "facts":
            return super().ask(what, **arguments)
        return facts_of(self.contender, ran=1)


def facts_of(contender: process.Contender, ran: int) -> dict[str, Any]:
    algorithm = contender.algorithm and "single_pass"  # which `auto` is
    executed = {algorithm: {"eager": ran, "compiled": 0}} if algorithm else {}
    of_engine = {"architecture": "A", "start_s": 1.0, "peak_memory_bytes": 10**9, "gpu": None}
    of_engine |= {"kv_cache_tokens": 4096, "dtype": "bfloat16", "backend": "cpp", "vocabulary": 50}
    of_engine |= {"plugin_loaded": contender.has_plugin, "executed": executed, "compiled": False}
    of_engine |= {"algorithm": algorithm}
    return facts() | of_engine


@pytest.mark.parametrize(
    ("load", "seconds", "is_told"), [(0.6, [1.0], False), (QUIET, [1.0], True)]
)
def test_the_command_says_first_that_a_machine_is_busy(load, seconds, is_told, monkeypatch, capsys):
    said_before_engines = []

    @contextmanager
    def running(contender: process.Contender, *_):
        said_before_engines.append(capsys.readouterr().err)
        engine = Whole(contender.name, [], seconds)
        engine.contender, engine.at_start = contender, facts_of(contender, ran=0)
        yield engine

    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(session, "pieces_held", nullcontext)
    monkeypatch.setattr(busy, "load_of_others", lambda: load)
    assert main(["bench", str(DEMO), "--quick"]) == 0
    shown = capsys.readouterr()
    assert ("This machine is busy" in said_before_engines[0]) != is_told
    assert ("AttnRes takes 1.00 (" in shown.out) == is_told
    assert ("No ratio is given for prefill and decode" in shown.out) != is_told
    found = json.loads(shown.out.splitlines()[-1])
    jsonschema.validate(found, SCHEMA)
    assert found["trust"]["load"] == load
    assert all((one is not None) == is_told for one in found["overhead"].values())
    assert found["breakdown"] is None and found["end"]["by"] == "starts"
    if is_told:
        assert half_width(found["overhead"]["decode"]) <= busy.MOST_SPREAD
