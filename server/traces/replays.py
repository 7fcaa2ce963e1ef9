"""Replays by the workers for the routes, one at a time."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import HTTPException

from attnres_serve import sentences
from attnres_serve.compat import requests
from attnres_serve.depth.resolved_edits import Resolved
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing import predicted
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
    after = None if top is None else (predicted.following(ids, positions), top)
    arguments = ids[: positions[-1] + 1], positions, sites, list(edits), after, lens, vectors
    lock: asyncio.Lock = state.attn_res_replays
    await lock.acquire()
    running = asyncio.ensure_future(requests.ask_workers(client, "attn_res_trace", *arguments))
    running.add_done_callback(lambda _: lock.release())
    result = trace_answer.merged(await asyncio.shield(running))
    if result.problem is not None:
        raise HTTPException(500, sentences.capital(result.problem))
    return result
