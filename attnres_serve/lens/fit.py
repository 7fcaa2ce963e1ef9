"""The check that the numbers of a trace fit its tokens and sources."""

from attnres_serve.errors import SettingError
from attnres_serve.tracing.answer import Prediction, TraceAnswer


def require_fit(trace: TraceAnswer, name: str) -> None:
    """Refuse an incomplete trace.

    Args:
        trace: a trace from a file or a server.
        name: name of the file or the server, with which a message begins.

    Raises:
        SettingError: a row is missing, or has too few or too many numbers.
    """
    rows = len(trace.tokens)
    for site in trace.sites:
        tables = [*site.weights, *site.rms]
        whole = {len(site.weights), len(site.rms), len(site.entropy)} == {rows}
        if not whole or {len(row) for row in tables} - {len(site.sources)}:
            raise SettingError(
                f"{name}: the numbers of site {site.index} do not fit its {len(site.sources)} "
                f"sources and the {rows} tokens; trace the text again."
            )
    logprobs = trace.logprobs
    runs = [] if logprobs is None else [logprobs.unedited, logprobs.edited]
    lens = [reading.predictions for reading in trace.lens or ()]
    for part, every in (("logprobs", [run for run in runs if run is not None]), ("lens", lens)):
        if not _are_alike(every, rows):
            raise SettingError(
                f"{name}: the numbers of `{part}` do not fit the {rows} tokens; trace the text "
                "again."
            )


def _are_alike(tables: list[list[Prediction]], rows: int) -> bool:
    """Whether every table has a row for each token, and all rows have equally many tokens."""
    named = {len(row.top) for table in tables for row in table}
    return {len(table) for table in tables} <= {rows} and len(named) <= 1
