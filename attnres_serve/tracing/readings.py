"""The readings of a depth lens, and its results.

A lens is the logit lens of depth attention: an intermediate vector of the model is read through the
model's last norm and head, as if it were the last mix.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attnres_serve.depth.sites import PARTIAL, Site
from attnres_serve.errors import SettingError
from attnres_serve.tracing import predicted

MIX = -1  # instead of the number of a source
WHOLE = "mix"  # its name in a response
MOST = 2**14  # tokens x readings of a request; each costs a product with the head


class Reading(NamedTuple):
    """One vector of each token, in a form for workers.

    Attributes:
        site: index of the site.
        column: the number of its source, or ``MIX`` for its mix.
    """

    site: int
    column: int


class Lens(NamedTuple):
    """A requested lens, in a form for workers.

    Attributes:
        readings: the readings, ascending by site.
        following: the token after each traced one, or ``predicted.NONE``.
        top: number of the most probable tokens to return.
    """

    readings: list[Reading]
    following: list[int]
    top: int


def readings(sites: Sequence[Site]) -> list[Reading]:
    """The mix of every site, and every source once.

    The embedding and a finished block are equal at all sites, so they are read at the first one.
    The partial sum differs at every site.

    Args:
        sites: the traced sites that mix, ascending.
    """
    result, known = [], set()
    for site in sites:
        result.append(Reading(site.index, MIX))
        for column, name in enumerate(site.sources):
            if name == PARTIAL or name not in known:
                result.append(Reading(site.index, column))
                known.add(name)
    return result


def require_few(rows: Sequence[Reading], tokens: int) -> None:
    """Refuse a lens that costs far more than the replay.

    Raises:
        SettingError: more than ``MOST`` vectors are read.
    """
    if len(rows) * tokens > MOST:
        raise SettingError(
            f"A lens reads at most {MOST} vectors, each of which costs a product with the head; "
            f"{tokens} tokens x {len(rows)} mixes and sums are {tokens * len(rows)}, so ask "
            "for fewer tokens or sites."
        )


def lens_readings(
    sites: Sequence[Site],
    positions: Sequence[int],
    lens: Lens,
    packed: Sequence[bytes] | None,
    texts_of: Callable[[list[int]], Sequence[str | None]],
) -> list[dict[str, Any]]:
    """An ``answer.LensReading`` for each of the readings.

    Args:
        sites: the traced sites.
        positions: the positions of the traced tokens.
        lens: the lens.
        packed: the workers' ``Predictions.packed`` for all readings in order; None without
            readings.
        texts_of: returns the texts of token ids.
    """
    by_index, rows = {site.index: site for site in sites}, len(positions)
    count = len(lens.readings)
    whole = [*positions] * count, lens.following * count
    rows_read = [] if packed is None else predicted.predictions(packed, *whole, texts_of)
    result = []
    for number, (index, column) in enumerate(lens.readings):
        vector = WHOLE if column == MIX else by_index[index].sources[column]
        result.append(
            {
                "site": index if vector in (WHOLE, PARTIAL) else None,
                "vector": vector,
                "predictions": rows_read[number * rows : (number + 1) * rows],
            }
        )
    return result
