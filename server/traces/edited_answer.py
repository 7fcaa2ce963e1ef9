"""The answer that a model gives under the edits of a trace."""

from collections.abc import Sequence

from attnres_serve.compat import requests
from attnres_serve.depth.resolved_edits import Resolved
from attnres_serve.server.traces import replays
from attnres_serve.tracing import predicted


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
