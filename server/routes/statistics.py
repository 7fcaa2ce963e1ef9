"""``/v1/attn_res/statistics``: replays of a sample of the sequences that are served, summed."""

import asyncio
import random
import time
from collections import deque
from functools import partial
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Body, HTTPException, Request

from attnres_serve.compat import engine_config, host, openai_app, openai_server, requests
from attnres_serve.compat import token_counts as counting
from attnres_serve.compat.workarounds.replacing_calls import CHANGED
from attnres_serve.depth.sites import Site
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.refusal import REFUSALS
from attnres_serve.server.routes import trace
from attnres_serve.server.traces import replays
from attnres_serve.tracing.statistics import COST, StatisticsAnswer, of_site, sums

MOST = 64  # sequences that wait

router = APIRouter(
    prefix="/v1/attn_res/statistics", tags=["Attention Residuals"], responses=REFUSALS
)


class Collector:
    """Takes sequences as they end, replays one after the other and sums their weights.

    After a replay of t seconds it waits for t (1 / cost - 1) seconds.  If sequences end faster than
    that, a new one replaces a random one of those that wait.  So all sequences of the same time are
    equally likely to be counted, however long they are.
    """

    def __init__(
        self, state, places: list[Site], cost: float, clock=time.monotonic, sleep=asyncio.sleep
    ) -> None:
        self._state, self._client, self._places = state, state.engine_client, places
        self._clock, self._sleep = clock, sleep
        self._limit = (openai_server.policy_of(state.args) or Policy()).max_trace_tokens
        self._waiting: deque[tuple[float | None, list[int], int]] = deque()
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._version: tuple[str | None, float | None] | None = None
        self._sums: dict[int, np.ndarray] = {}
        name = openai_app.served_names(state)[0]
        self.counts = StatisticsAnswer(model=name, running=True, cost=cost, restarts=-1)

    def begin(self) -> counting.Take:
        """The function to call when a sequence that begins now has ended."""
        return partial(self._take, getattr(self._client, CHANGED, None))

    def _take(self, changed: float | None, prompt: list[int], answer: list[int]) -> None:
        if len(prompt) + len(answer) > self._limit:
            self.counts.skipped["too_long"] += self.counts.running
        elif self.counts.running:
            if len(self._waiting) == MOST:
                del self._waiting[random.randrange(MOST)]
                self.counts.skipped["queue_full"] += 1
            self._waiting.append((changed, [*prompt, *answer], len(prompt)))
            self._came.set()

    async def current(self) -> tuple[str | None, float | None]:
        """Version and time of the weights; if they are new, everything begins anew."""
        version = await requests.weights_of(self._client)
        if version != self._version:
            self._version, self._sums = version, {}
            kept = self.counts.model_dump(include={"model", "running", "cost"})
            restarts = self.counts.restarts + 1
            self.counts = StatisticsAnswer(**kept, weights=version[0], restarts=restarts)
        return version

    async def run(self) -> None:
        """Replay what comes, until it is cancelled or a replay fails."""
        try:
            while await self._came.wait():
                while self._waiting:
                    await self._sleep(await self._count(*self._waiting.popleft()))
                self._came.clear()
        except Exception as error:  # a cancelled task is none
            host.logger().exception("AttnRes: statistics of what is served end")
            self.counts.problem = getattr(error, "detail", "A replay failed; the log says why.")
            self.end()

    def start(self) -> None:
        """Take what begins from now on."""
        self._task, counting.listener = asyncio.create_task(self.run()), self.begin

    def end(self) -> None:
        """Take nothing more, and leave what waits."""
        self._waiting.clear()
        self.counts.running, counting.listener = False, None
        if self._task is not None:
            self._task.cancel()

    async def answer(self) -> StatisticsAnswer:
        """What was counted."""
        if self.counts.running:
            await self.current()
        tokens, by_site = self.counts.tokens, self._sums
        counted = [of_site(one, by_site[one.index], tokens) for one in self._places if by_site]
        return self.counts.model_copy(update={"sites": counted})

    async def _count(self, changed: float | None, ids: list[int], prompt: int) -> float:
        """Count a sequence; returns the seconds in which nothing is to be replayed."""
        while await requests.is_asleep(self._client):
            await self._sleep(1.0)
        version, begin = await self.current(), self._clock()
        by_site = await self.replay(ids, prompt) if changed == version[1] else {}
        seconds = self._clock() - begin
        if await self.current() != version or not by_site:
            self.counts.skipped["weights_replaced"] += 1
        else:
            self.counts.sequences += 1
            self.counts.tokens["prefill"] += prompt
            self.counts.tokens["decode"] += len(ids) - prompt
            self._sums = {site: self._sums.get(site, 0) + one for site, one in by_site.items()}
        self.counts.seconds += seconds
        return seconds * (1 / self.counts.cost - 1)

    async def replay(self, ids: list[int], prompt: int) -> dict[int, np.ndarray]:
        """``statistics.sums`` by site of a sequence; its first ``prompt`` tokens are the prompt."""
        request = replays.ReplayRequest(
            ids, [*range(len(ids))], [site.index for site in self._places]
        )
        traced = (await replays.replay(self._state, self._client, request, [])).sites
        each = {at: np.frombuffer(weights, np.float32) for at, (weights, _) in traced.items()}
        tables = {at: weights.reshape(len(ids), -1) for at, weights in each.items()}
        return {
            at: await asyncio.to_thread(sums, weights, prompt) for at, weights in tables.items()
        }


@router.post("/start")
async def start(
    request: Request, cost: Annotated[float, Body(embed=True, gt=0, le=1)] = COST
) -> StatisticsAnswer:
    """Begin to count the requests that come from now on; what was counted before is gone."""
    state = request.app.state
    places = [site for site in await trace.places_of(state.engine_client) if site.mixes]
    if not engine_config.is_only_api_server(state.engine_client.vllm_config):
        raise HTTPException(501, "Statistics need one API server; leave --api-server-count out.")
    collector = Collector(state, places, cost)
    await collector.current()
    if hasattr(state, "attn_res_statistics"):
        state.attn_res_statistics.end()
    state.attn_res_statistics = collector  # after no wait, so that one of two starts ends the other
    collector.start()
    return await collector.answer()


@router.post("/stop")
async def stop(request: Request) -> StatisticsAnswer:
    """Count no further sequence; the counts can still be read."""
    if hasattr(request.app.state, "attn_res_statistics"):
        request.app.state.attn_res_statistics.end()
    return await statistics(request)


@router.get("")
async def statistics(request: Request) -> StatisticsAnswer:
    """What was counted since the start, and under which weights."""
    state = request.app.state
    if not hasattr(state, "attn_res_statistics"):
        return StatisticsAnswer(model=openai_app.served_names(state)[0])
    answer: StatisticsAnswer = await state.attn_res_statistics.answer()
    return answer
