"""Replays that a route asks of the workers, one at a time."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import HTTPException

from attnres_serve.compat import requests
from attnres_serve.depth.edits import Resolved
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing.readings import Lens

NOTHING = [b"", b"", b""]  # predicted of no token


class Asked(NamedTuple):
    """What a replay is to give.

    Attributes:
        ids: the sequence.
        positions: ascending, of the tokens that are traced.
        sites: indices of those that are traced.
        top: the number of most probable tokens behind each; None for no logprobs.
        lens: what else predicts, of the same tokens; None for nothing.
        vectors: whether those of the sites are wanted.
    """

    ids: list[int]
    positions: list[int]
    sites: list[int]
    top: int | None = None
    lens: Lens | None = None
    vectors: bool = False


async def replay(state, client, asked: Asked, edits: Sequence[Resolved]) -> trace_answer.Found:
    """What the workers answer, merged.

    One replay at a time, so that steps of other requests run between two of them.  A client that
    goes away leaves the queue; a replay that runs goes on to its end, for it cannot be stopped.

    Raises:
        HTTPException: there is a problem.
    """
    ids, positions, sites, top, lens, vectors = asked
    if not positions:
        none = dict.fromkeys(sites, (b"", b""))
        return trace_answer.Found(None, none, NOTHING, NOTHING)
    predicted = None if top is None else (trace_answer.following(ids, positions), top)
    words = ids[: positions[-1] + 1], positions, sites, list(edits), predicted, lens, vectors
    lock: asyncio.Lock = state.attn_res_replays
    await lock.acquire()
    running = asyncio.ensure_future(requests.ask_workers(client, "attn_res_trace", *words))
    running.add_done_callback(lambda _: lock.release())
    found = trace_answer.merged(await asyncio.shield(running))
    if found.problem is not None:
        raise HTTPException(500, found.problem[:1].upper() + found.problem[1:])
    return found


async def generate(
    state, client, ids: Sequence[int], max_tokens: int, edits: Sequence[Resolved]
) -> list[int]:
    """Greedy continuation of a prompt under edits, with a replay for each token.

    Steps of other requests run between two tokens.
    """
    stops, sequence = requests.stop_tokens(client), list(ids)
    while len(sequence) < len(ids) + max_tokens:
        found = await replay(state, client, Asked(sequence, [len(sequence) - 1], [], 1), edits)
        sequence.append(trace_answer.best(found))
        if sequence[-1] in stops:
            break
    return sequence[len(ids) :]
