"""The metrics of attnres-serve, which ``/metrics`` shows beside vLLM's.

Plain metrics of prometheus_client, like vLLM's: a custom collector would be wrong with several API
servers on one port.
"""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from attnres_serve.depth import edit_text
from attnres_serve.depth.edits import Edit

OUTCOMES = ("served", "refused", "failed", "cancelled")

traces = Counter("attnres_traces", "Requests for a trace, by how they ended", ["outcome"])
passes = Counter(
    "attnres_forward_passes",
    "Forward passes of the model, warm-up and profiling included",
    ["algorithm", "mode"],
)
bank = Gauge(
    "attnres_bank_bytes",
    "Memory for the block bank in the largest step, on every worker",
    multiprocess_mode="max",
)

weights = Gauge(
    "attnres_weights_changed_timestamp_seconds",
    "When the weights of this version were put in the place of others",
    ["version"],
    multiprocess_mode="max",
)

edits = Gauge(
    "attnres_edits",
    "Edits that the model is served under, each in words",
    ["edit"],
    multiprocess_mode="max",
)

SERVED = (traces, passes, bank, weights, edits)

for _outcome in OUTCOMES:  # so that the first request is an increase
    traces.labels(_outcome)
_shown = {"version": "default"}  # the version of the weights at the start
weights.labels(_shown["version"])

_counted: dict[tuple[str, str], int] = {}


def tell_weights(version: str, changed: float | None) -> None:
    """Set the only version of the weights, and when they were changed; 0 for the first."""
    if version != (before := _shown["version"]):
        weights.remove(before)
        _shown["version"] = version
    weights.labels(version).set(changed or 0)


def tell_edits(served: Sequence[Edit]) -> None:
    """Set the edits that the model is served under."""
    edits.clear()
    for edit in served:
        edits.labels(edit_text.write(edit)).set(1)


def count_passes(executed: dict[str, dict[str, int]]) -> None:
    """Add the passes since the last call.

    Args:
        executed: the workers' counts since the start, by algorithm and mode.
    """
    for algorithm, modes in executed.items():
        for mode, total in modes.items():
            before = _counted.get((algorithm, mode), 0)
            passes.labels(algorithm, mode).inc(max(total - before, 0))
            _counted[algorithm, mode] = total
