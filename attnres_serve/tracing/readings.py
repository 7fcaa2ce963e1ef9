"""What a depth lens reads, by numbers, and what it answers.

A lens is the logit lens of depth attention: a vector that the model holds on its way is read by the
model's own last norm and head, as if it were the last mix.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attnres_serve.depth.sites import PARTIAL, Site
from attnres_serve.errors import SettingError
from attnres_serve.tracing import answer

MIX = -1  # instead of the number of a source
WHOLE = "mix"  # what an answer calls it
MOST = 2**14  # tokens x readings of a request, each of which costs a product with the head


class Reading(NamedTuple):
    """One vector for each token, in a form that goes to workers.

    Attributes:
        site: index of the site that is listened to.
        column: the number of its source, or ``MIX`` for what it makes of all of them.
    """

    site: int
    column: int


class Lens(NamedTuple):
    """A lens that is asked for, in a form that goes to workers.

    Attributes:
        readings: ascending by site.
        following: the token that follows each of those that are traced, or ``answer.NONE``.
        top: how many of the most probable tokens are wanted.
    """

    readings: list[Reading]
    following: list[int]
    top: int


def readings(sites: Sequence[Site]) -> list[Reading]:
    """The mix of every site, and every source once.

    The embedding and a finished block are the same at every site that reads them, so they are read
    at the first.  The partial sum is another one at every site.

    Args:
        sites: ascending, those that mix and are traced.
    """
    found, known = [], set()
    for site in sites:
        found.append(Reading(site.index, MIX))
        for column, name in enumerate(site.sources):
            if name == PARTIAL or name not in known:
                found.append(Reading(site.index, column))
                known.add(name)
    return found


def require_few(rows: Sequence[Reading], tokens: int) -> None:
    """Refuse a lens whose work is out of proportion to the replay's own.

    Raises:
        SettingError: more than ``MOST`` vectors are read.
    """
    if len(rows) * tokens > MOST:
        raise SettingError(
            f"A lens reads at most {MOST} vectors, each of which costs a product with the head; "
            f"{tokens} tokens x {len(rows)} mixes and sums are {tokens * len(rows)}, so ask "
            "for fewer tokens or sites."
        )


def answered(
    sites: Sequence[Site],
    positions: Sequence[int],
    asked: Lens,
    packed: Sequence[bytes] | None,
    texts_of: Callable[[list[int]], Sequence[str | None]],
) -> list[dict[str, Any]]:
    """An ``answer.LensReading`` for each of the readings.

    Args:
        sites: those that are traced.
        positions: of the traced tokens.
        asked: what was asked for.
        packed: what the workers answer, as ``Predictions.packed`` gives it for the tokens of one
            reading after the other; None where there is no reading.
        texts_of: the texts of token ids.
    """
    by_index, rows = {site.index: site for site in sites}, len(positions)
    count = len(asked.readings)
    whole = [*positions] * count, asked.following * count
    found = [] if packed is None else answer.predictions(packed, *whole, texts_of)
    result = []
    for number, (index, column) in enumerate(asked.readings):
        vector = WHOLE if column == MIX else by_index[index].sources[column]
        result.append(
            {
                "site": index if vector in (WHOLE, PARTIAL) else None,
                "vector": vector,
                "predictions": found[number * rows : (number + 1) * rows],
            }
        )
    return result
