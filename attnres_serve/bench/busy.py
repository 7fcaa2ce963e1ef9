"""Finds a machine that is too busy for a trial's ratio to be believed.

A trial (``--quick``) has one start and few rounds, so that nothing averages out what other
processes do meanwhile.  Its ratio of a phase is believed if both hold:

* In the two seconds before the first engine starts, other processes take at most a tenth
  (``MOST_LOAD``) of the cores that this process may use, by ``/proc/stat``.
* The phase's interval over the interleaved rounds reaches at most 5 % (``MOST_SPREAD``) to either
  side of its ratio.

The first tells of a machine that is busy all the time, the second of one that is busy at times.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import psutil

from attnres_serve.bench.overhead import half_width

LOOK = 2.0  # seconds for which load is looked at
MOST_LOAD = 0.1  # of the cores that this process may use
MOST_SPREAD = 0.05  # half of a phase's interval over rounds, as a share of its ratio
RATIOS = frozenset(
    ("ratio", "ci95", "includes_1", "start_ratios", "round_ratios")
)  # of a cell's engine


def load_of_others(seconds: float = LOOK) -> float:
    """The share of this process's cores that was busy while this process slept for ``seconds``."""
    before = _idle()
    begin = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begin
    idle = [(after - first) / took for after, first in zip(_idle(), before, strict=True)]
    return min(1.0, max(0.0, 1 - sum(idle) / len(idle)))


def _idle() -> list[float]:
    """Seconds that each of this process's cores has been idle, waiting for a disk included."""
    times = psutil.cpu_times(percpu=True)
    own = [times[core] for core in sorted(os.sched_getaffinity(0)) if core < len(times)]
    return [one.idle + one.iowait for one in own]


def warning(load: float) -> str | None:
    """The sentence for a machine that is busy before the start; None for one that is not."""
    if load <= MOST_LOAD:
        return None
    return (
        f"This machine is busy: other processes take {load:.0%} of the cores, and a ratio is "
        f"believed up to {MOST_LOAD:.0%}. This trial will tell times and no ratio."
    )


def judge(document: Mapping[str, Any], load: float) -> dict[str, Any]:
    """The document of a trial without the ratios that are not to be believed.

    Args:
        document: with the ratios of all phases.
        load: of other processes before the start, a share of the cores.

    Returns:
        The document; ``trust`` tells the rule and what it found, an overhead that is not believed
        is None, and its cells have times alone.
    """
    found = {name: document[name] for name in ("overhead", "control") if document[name] is not None}
    spread = {
        phase: max(half_width(phases[phase]) for phases in found.values())
        for phase in document["overhead"]
    }
    believed = {
        phase: load <= MOST_LOAD and reach <= MOST_SPREAD for phase, reach in spread.items()
    }
    kept = {
        name: {phase: one if believed[phase] else None for phase, one in phases.items()}
        for name, phases in found.items()
    }
    cells = [cell if believed[cell["phase"]] else _times_alone(cell) for cell in document["cells"]]
    trust = {
        "load": load,
        "most_load": MOST_LOAD,
        "spread": spread,
        "most_spread": MOST_SPREAD,
        "believed": believed,
    }
    return {**document, **kept, "cells": cells, "trust": trust}


def _times_alone(cell: Mapping[str, Any]) -> dict[str, Any]:
    engines = {
        name: {key: value for key, value in times.items() if key not in RATIOS}
        for name, times in cell["engines"].items()
    }
    return {**cell, "engines": engines}


def verdict(trust: Mapping[str, Any]) -> list[str]:
    """Sentences for the phases whose ratio was withheld, and the rule by which it was."""
    withheld = [phase for phase, is_believed in trust["believed"].items() if not is_believed]
    if not withheld:
        return []
    rounds = ", ".join(f"{trust['spread'][phase]:.1%} in {phase}" for phase in withheld)
    return [
        f"No ratio is given for {' and '.join(withheld)}: the machine is too busy for one start to "
        f"tell it. Other processes took {trust['load']:.0%} of the cores before the start, where "
        f"{trust['most_load']:.0%} are allowed. The interval over rounds reached {rounds} to a "
        f"side, where {trust['most_spread']:.0%} are allowed. Try again when the machine is quiet, "
        "or measure without --quick."
    ]
