"""Two summaries next to each other: of two texts, two checkpoints, or both."""

import numpy as np

from attnres_serve.errors import SettingError
from attnres_serve.inspect import statistics
from attnres_serve.inspect.rows import SiteRow
from attnres_serve.inspect.statistics import Summary

NUMBERS = ("tokens", "mean", "low", "high")


def require_same(names: tuple[str, str], rows: tuple[list[SiteRow], list[SiteRow]]) -> None:
    """Refuse checkpoints whose cells do not belong together.

    Args:
        names: of the two.
        rows: the sites of each.

    Raises:
        SettingError: they have other sites or sources.
    """
    first, second = rows
    differing = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
    if len(first) != len(second):
        found = f"{len(first)} sites mix in {names[0]} and {len(second)}"
    elif differing:
        one, other = differing[0]
        found = f"site {one.index} is {_words(one)} in {names[0]}, and {_words(other)}"
    else:
        return
    raise SettingError(
        f"{found} in {names[1]}; expected two checkpoints with the same sites and sources."
    )


def _words(row: SiteRow) -> str:
    place = row.kind if row.layer is None else f"{row.kind} {row.layer}"
    return f"{place} with {len(row.sources)} sources, the last one {row.sources[-1]},"


def table(first: Summary, second: Summary) -> dict[str, list]:
    """The table of the first, with the numbers of both and the second mean less the first."""
    tables = statistics.table(first), statistics.table(second)
    change = np.subtract(tables[1]["mean"], tables[0]["mean"])
    places = {name: column for name, column in tables[0].items() if name not in NUMBERS}
    numbers = {
        f"{which} {name}": own[name]
        for which, own in zip(("first", "second"), tables, strict=True)
        for name in NUMBERS
    }
    return places | numbers | {"difference": list(change)}


def arrays(first: Summary, second: Summary) -> dict[str, np.ndarray]:
    """The same as arrays of classes, sites and sources."""
    both = statistics.arrays(first), statistics.arrays(second)
    places = {name: part for name, part in both[0].items() if name not in NUMBERS}
    numbers = {
        f"{which}_{name}": own[name]
        for which, own in zip(("first", "second"), both, strict=True)
        for name in NUMBERS
    }
    return places | numbers | {"difference": second.mean - first.mean}
