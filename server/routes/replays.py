"""Replays by the workers for the routes, one at a time."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import HTTPException

from attnres_serve.compat import requests
from attnres_serve.depth.edits import Resolved
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing.readings import Lens

NOTHING = [b"", b"", b""]  # predictions for no token


class ReplayRequest(NamedTuple):
    """A request for a replay.

    Attributes:
        ids: the sequence.
        positions: the traced positions, ascending.
        sites: indices of the traced sites.
        top: number of the most probable tokens after each; None for no logprobs.
        lens: a depth lens for the same tokens, or None.
        vectors: whether to return the vectors of the sites.
    """

    ids: list[int]
    positions: list[int]
    sites: list[int]
    top: int | None = None
    lens: Lens | None = None
    vectors: bool = False


async def replay(
    state, client, request: ReplayRequest, edits: Sequence[Resolved]
) -> trace_answer.ReplayResult:
    """The merged results of the workers.

    Replays run one at a time, so that steps of other requests run between them.  A disconnected
    client leaves the queue; a running replay cannot be stopped.

    Raises:
        HTTPException: a worker has a problem.
    """
    ids, positions, sites, top, lens, vectors = request
    if not positions:
        none = dict.fromkeys(sites, (b"", b""))
        return trace_answer.ReplayResult(None, none, NOTHING, NOTHING)
    predicted = None if top is None else (trace_answer.following(ids, positions), top)
    arguments = ids[: positions[-1] + 1], positions, sites, list(edits), predicted, lens, vectors
    lock: asyncio.Lock = state.attn_res_replays
    await lock.acquire()
    running = asyncio.ensure_future(requests.ask_workers(client, "attn_res_trace", *arguments))
    running.add_done_callback(lambda _: lock.release())
    result = trace_answer.merged(await asyncio.shield(running))
    if result.problem is not None:
        raise HTTPException(500, result.problem[:1].upper() + result.problem[1:])
    return result


async def generate(
    state, client, ids: Sequence[int], max_tokens: int, edits: Sequence[Resolved]
) -> list[int]:
    """Greedy continuation of a prompt under edits, with a replay for each token.

    Steps of other requests run between two tokens.
    """
    stops, sequence = requests.stop_tokens(client), list(ids)
    while len(sequence) < len(ids) + max_tokens:
        result = await replay(
            state, client, ReplayRequest(sequence, [len(sequence) - 1], [], 1), edits
        )
        sequence.append(trace_answer.best(result))
        if sequence[-1] in stops:
            break
    return sequence[len(ids) :]
