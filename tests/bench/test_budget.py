"""``attnres-serve bench --budget``: when a measurement ends, and what it says until then."""

import argparse
import io
import re
import sys
import time
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from attnres_serve.bench import breakdown, command, process, report, session
from attnres_serve.bench.budget import Budget
from attnres_serve.bench.length import (
    FEWEST_ROUNDS,
    NARROW,
    ROUNDS_OF_ONE,
    TRIAL,
    USUAL,
    Length,
    Until,
    length_of,
)
from attnres_serve.bench.overhead import half_width
from attnres_serve.bench.progress import Progress
from attnres_serve.errors import SettingError
from tests.bench.test_bench import DECODE, PREFILL, SCHEMA, Started, document

NEVER_NARROW = [1.0, 1.1]
EIGHT = Length(8, 4, Until(NARROW, 32))
ENGINE_START, REQUEST = 10.0, 0.1  # seconds on the clock of the tests


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Started):
    """An engine whose requests take ``REQUEST`` seconds on a clock."""

    clock: Clock

    def ask(self, what: str, **arguments: Any) -> Any:
        if what == "begin":
            self.clock.now += REQUEST
        return super().ask(what, **arguments)


@pytest.fixture
def measured(monkeypatch):
    """A function that runs a session by the clock: its outcome, its budget and when starts began.

    ``began`` has, of every start that was finished, when it began and when it ended.
    """
    clock, began = Clock(), []

    @contextmanager
    def running(contender: process.Contender, *_):
        if contender.name == "baseline":
            ratios.append(NEVER_NARROW[len(ratios) % 2])
            began.append([clock.now])
        clock.now += ENGINE_START
        engine = Timed(contender.name, [], [1.0 if contender.name == "baseline" else ratios[-1]])
        engine.clock = clock
        yield engine
        began[-1][1:] = [clock.now]

    ratios: list[float] = []
    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(session, "pieces_held", nullcontext)

    def run(seconds: float, length: Length = EIGHT, **options: Any):
        budget = Budget(seconds, clock)
        contenders = [process.Contender(name, ()) for name in ("baseline", "attnres")]
        asked = contenders, [PREFILL, DECODE], length, 1, None, None, budget
        found = session.run(*asked, **options)
        return found, budget, began

    return run


def one_start(rounds: int) -> float:
    """Seconds that a start of the fixture takes."""
    turns = PREFILL.turns + DECODE.turns
    return 2 * (ENGINE_START + REQUEST * turns * (rounds + 2))


def test_it_ends_before_the_start_that_would_overrun_it(measured):
    found, budget, began = measured(4.05 * one_start(4))
    assert found.ended_by == "budget" and len(found.results) == len(began) == 3
    # The fourth would just have fitted, without a margin; no start was begun and lost.
    assert budget.spent <= budget.seconds
    assert found.took_s == budget.spent == pytest.approx(3 * one_start(4))


def test_a_budget_that_is_large_enough_changes_nothing(measured):
    found, _, began = measured(1000 * one_start(4), Length(8, 4, Until(NARROW, 12)))
    assert found.ended_by == "starts" and len(began) == 12
    assert found.rounds == 4


@pytest.mark.parametrize("seconds", [1.0, 0.9 * one_start(4)])
def test_the_first_start_is_always_finished_and_has_an_interval(measured, seconds, capsys):
    found, budget, began = measured(seconds)
    assert found.ended_by == "budget" and len(began) == 1
    assert found.rounds == FEWEST_ROUNDS and budget.spent > budget.seconds
    said = capsys.readouterr().err
    assert re.match(r"One start of all engines takes about 0:\d\d minutes, more than the bud", said)


def test_a_start_that_leaves_no_room_for_another_uses_the_rest(measured, capsys):
    found, budget, began = measured(one_start(11.5))
    assert found.ended_by == "budget" and len(began) == 1
    assert 8 <= found.rounds <= 11 and budget.spent <= budget.seconds
    assert "more than the budget" not in capsys.readouterr().err
    assert EIGHT.told(1, found.rounds)["rounds"] == found.rounds


def test_one_start_has_no_more_rounds_than_a_single_one(measured):
    found, _, _ = measured(2.05 * one_start(4), Length(8, 18, Until(NARROW, 32)))
    assert found.rounds == ROUNDS_OF_ONE


def test_the_first_start_counts_only_while_there_is_no_other():
    """It compiled, and the others load what it has compiled."""
    from attnres_serve.bench.budget import next_start

    assert next_start([60.0]) == 60.0
    assert next_start([60.0, 20.0, 25.0]) == 25.0


def test_the_profile_is_beside_the_budget(measured, monkeypatch):
    def profile(engines, *_) -> list:
        engines[0].clock.now += 1000.0
        return []

    monkeypatch.setattr(breakdown, "measure", profile)
    budget = Budget(4.05 * one_start(4))
    plain, *_ = measured(budget.seconds)
    clock_of = session.run

    def with_translation(*words: Any, **options: Any) -> Any:
        return clock_of(*words[:4], object(), *words[5:], **options)

    monkeypatch.setattr(session, "run", with_translation)
    profiled, *_ = measured(budget.seconds)
    assert profiled.breakdown == [] and plain.breakdown is None
    assert profiled.took_s == pytest.approx(plain.took_s)
    assert len(profiled.results) == len(plain.results) == 3


# What is said meanwhile.


def test_without_a_terminal_there_is_one_line_for_each_start(measured, capsys):
    found, *_ = measured(4.05 * one_start(4))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(found.results) == 3
    pattern = (
        r"start {} done after \d:\d\d of \d:\d\d minutes: prefill 1\.\d{{3}} \(.* to .*\), decode "
    )
    for number, line in enumerate(said, 1):
        assert re.match(pattern.format(number), line), line
    assert said[0].endswith(" over its rounds")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_live_line_with_the_ratio_as_it_narrows(measured, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    measured(4.05 * one_start(4))
    said = terminal.getvalue()
    assert "\n" not in said, "more than one line"
    states = said.split("\r")
    assert max(map(len, states)) <= 150
    assert any("attnres: prefill of 128 tokens" in state for state in states)
    first = [state for state in states if "start 1, " in state and "prefill 1.000" in state]
    assert first, "nothing of the ratio before the first start's end"
    second, third = ({s for s in states if f"start {n}, " in s} for n in (2, 3))
    assert second and all(re.search(r"decode 1\.\d+ \(", state) for state in second)
    assert third and all(re.search(r"decode 1\.\d+ \(", state) for state in third)


def test_the_time_goes_on_while_an_engine_starts(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    now = iter(range(1000))
    with Progress(Budget(600.0, lambda: next(now)), ["baseline", "attnres"], 10) as progress:
        progress.start()
        progress.step("starting baseline")
        said = terminal.getvalue()
        deadline = time.monotonic() + 20
        while terminal.getvalue() == said and time.monotonic() < deadline:
            time.sleep(0.1)
    states = re.findall(r"start 1, (0:\d\d) of 10:00; starting baseline", terminal.getvalue())
    assert len(set(states)) > 1


def test_a_trial_shows_no_ratio_before_it_is_judged(measured, capsys):
    measured(inf, TRIAL, tells_ratios=False)
    assert capsys.readouterr().err == "start 1 done after 0:30 minutes\n"


# The flag and the report.


def asked(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"budget": None, "starts": None, "quick": False} | given)


def test_the_usual_measurement_has_ten_minutes():
    assert command.budget_of(asked(), USUAL).seconds == 600
    assert command.budget_of(asked(starts=3), Length(3, 4)).seconds == inf
    assert command.budget_of(asked(quick=True), TRIAL).seconds == inf
    assert command.budget_of(asked(starts=3, budget=0.5), Length(3, 4)).seconds == 30


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"budget": 0.0}, "--budget is 0; expected a number of minutes above 0"),
        ({"budget": float("nan")}, "--budget is nan; expected"),
        ({"budget": 5.0, "quick": True}, "--budget does not go with one start"),
        ({"budget": 5.0, "starts": 1}, "--budget does not go with one start"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(given, sentence):
    own = asked(**given)
    length = length_of(own.starts, None, TRIAL if own.quick else USUAL)
    with pytest.raises(SettingError, match=sentence):
        command.budget_of(own, length)


def test_the_report_says_that_the_budget_ended_it_and_how_wide_the_intervals_are(measured):
    found, budget, _ = measured(4.05 * one_start(4))
    made = document(1.0, 1.1, 1.0)
    made["end"] = report.end(found, budget, "baseline")
    made["config"] |= {"until": {"half_width": NARROW, "starts": 32}}
    jsonschema.validate(made, SCHEMA)
    assert made["end"]["by"] == "budget" and made["end"]["budget_s"] == budget.seconds
    assert made["end"]["half_width"] == pytest.approx(half_width(made["overhead"]["decode"]), 0.1)
    shown = report.render(made)
    width = f"{made['end']['half_width']:.1%}"
    assert re.search(r"The budget of \d\S* minutes ended the measurement after 3 starts \(", shown)
    assert f"The widest interval reaches {width} to a side, where 1.5% is the aim." in shown
    longer = made | {"end": made["end"] | {"took_s": 2 * budget.seconds}}
    assert "was spent before the first start was finished, which took" in report.render(longer)
    made["end"] |= {"by": "starts"}
    assert "3 starts were too few for how this machine differs" in report.render(made)
    made["end"] |= {"by": "width"}
    assert "is the aim" not in report.render(made)


def test_a_report_without_a_profile_does_not_speak_of_it(tmp_path: Path):
    made = document(1.02)
    made["config"] |= {"profile": False}
    made["breakdown"] = None
    jsonschema.validate(made, SCHEMA)
    assert "profiler" not in report.render(made)
    assert "Where the time goes" not in report.render(made)
