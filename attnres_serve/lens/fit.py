"""Refuses a trace whose numbers do not fit its tokens and sources."""

from attnres_serve.errors import SettingError
from attnres_serve.tracing.answer import Prediction, TraceAnswer


def require_fit(trace: TraceAnswer, name: str) -> None:
    """Refuse a trace that is not whole.

    Args:
        trace: from a file or a server.
        name: of that, with which the sentence begins.

    Raises:
        SettingError: a row is missing or has a number too many.
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
    """True if every table has a row for each token, and all rows as many tokens."""
    named = {len(row.top) for table in tables for row in table}
    return {len(table) for table in tables} <= {rows} and len(named) <= 1
