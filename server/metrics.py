"""Our metrics, which ``/metrics`` shows beside vLLM's.

Plain metrics of prometheus_client's, as vLLM's are: they are also right where several API servers
answer on one port, which a collector of our own would not be.
"""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from attnres_serve.depth import edit_words
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

for _outcome in OUTCOMES:  # so that the first one is an increase
    traces.labels(_outcome)
_told = {"version": "default"}  # of the weights of the start
weights.labels(_told["version"])

_counted: dict[tuple[str, str], int] = {}


def tell_weights(version: str, changed: float | None) -> None:
    """Say since when the weights are those of a version, and of no other; 0 for the first."""
    if version != (before := _told["version"]):
        weights.remove(before)
        _told["version"] = version
    weights.labels(version).set(changed or 0)


def tell_edits(served: Sequence[Edit]) -> None:
    """Say which edits the model is served under, and no others."""
    edits.clear()
    for edit in served:
        edits.labels(edit_words.write(edit)).set(1)


def count_passes(executed: dict[str, dict[str, int]]) -> None:
    """Add what ran since the last call.

    Args:
        executed: passes since the start by algorithm and mode, as the workers count them.
    """
    for algorithm, modes in executed.items():
        for mode, total in modes.items():
            before = _counted.get((algorithm, mode), 0)
            passes.labels(algorithm, mode).inc(max(total - before, 0))
            _counted[algorithm, mode] = total
