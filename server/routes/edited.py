"""The edits of a trace by numbers, and the answer that the model gives under them."""

import asyncio
from collections.abc import Sequence

from attnres_serve.compat import requests
from attnres_serve.depth import resolved_edits
from attnres_serve.depth.resolved_edits import Resolved
from attnres_serve.depth.sites import Site
from attnres_serve.server.routes import replays
from attnres_serve.tracing import predicted
from attnres_serve.tracing.options import TraceOptions


async def resolved(
    options: TraceOptions, places: Sequence[Site], length: int, hidden: int
) -> list[Resolved]:
    """The edits of a trace; see ``resolved_edits.resolve``, which runs in another thread.

    Raises:
        SettingError: one is impossible, or the answer would be too long.
    """
    resolved_edits.require_few_tokens(options.max_tokens, "max_tokens", "edits")
    return await asyncio.to_thread(resolved_edits.resolve, options.edits, places, length, hidden)


async def generate(
    state, client, ids: Sequence[int], max_tokens: int, edits: Sequence[Resolved]
) -> list[int]:
    """Greedy continuation of a prompt under edits, with a replay for each token.

    Steps of other requests run between two tokens.
    """
    stops, sequence = requests.stop_tokens(client), list(ids)
    while len(sequence) < len(ids) + max_tokens:
        result = await replays.replay(
            state, client, replays.ReplayRequest(sequence, [len(sequence) - 1], [], 1), edits
        )
        sequence.append(predicted.best(result))
        if sequence[-1] in stops:
            break
    return sequence[len(ids) :]
