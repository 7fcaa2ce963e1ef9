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
from attnres_serve.server.routes import replays, trace
from attnres_serve.tracing.statistics import COST, StatisticsAnswer, of_site, sums

MOST = 64  # sequences that wait

router = APIRouter(
    prefix="/v1/attn_res/statistics", tags=["Attention Residuals"], responses=REFUSALS
)


class Collector:
    """Takes sequences as they end, replays one after the other and sums what it finds.

    After a replay of t seconds it waits for t (1 / cost - 1) seconds.  Where sequences end faster
    than that, a new one takes the place of a random one of those that wait, so a sequence is as
    likely to be counted as any other of the same time, however long it is.
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
        self.found = StatisticsAnswer(model=name, running=True, cost=cost, restarts=-1)

    def begin(self) -> counting.Take:
        """What is told a sequence that begins now, when it has ended."""
        return partial(self._take, getattr(self._client, CHANGED, None))

    def _take(self, changed: float | None, prompt: list[int], answer: list[int]) -> None:
        if len(prompt) + len(answer) > self._limit:
            self.found.skipped["too_long"] += self.found.running
        elif self.found.running:
            if len(self._waiting) == MOST:
                del self._waiting[random.randrange(MOST)]
                self.found.skipped["queue_full"] += 1
            self._waiting.append((changed, [*prompt, *answer], len(prompt)))
            self._came.set()

    async def current(self) -> tuple[str | None, float | None]:
        """Version and time of the weights; if they are new, everything begins anew."""
        version = await requests.weights_of(self._client)
        if version != self._version:
            self._version, self._sums = version, {}
            kept = self.found.model_dump(include={"model", "running", "cost"})
            restarts = self.found.restarts + 1
            self.found = StatisticsAnswer(**kept, weights=version[0], restarts=restarts)
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
            self.found.problem = getattr(error, "detail", "A replay failed; the log says why.")
            self.end()

    def start(self) -> None:
        """Take what begins from now on."""
        self._task, counting.listener = asyncio.create_task(self.run()), self.begin

    def end(self) -> None:
        """Take nothing more, and leave what waits."""
        self._waiting.clear()
        self.found.running, counting.listener = False, None
        if self._task is not None:
            self._task.cancel()

    async def answer(self) -> StatisticsAnswer:
        """What was counted."""
        if self.found.running:
            await self.current()
        tokens, own = self.found.tokens, self._sums
        counted = [of_site(one, own[one.index], tokens) for one in self._places if own]
        return self.found.model_copy(update={"sites": counted})

    async def _count(self, changed: float | None, ids: list[int], prompt: int) -> float:
        """Count a sequence; returns the seconds in which nothing is to be replayed."""
        while await requests.is_asleep(self._client):
            await self._sleep(1.0)
        version, begin = await self.current(), self._clock()
        own = await self.replay(ids, prompt) if changed == version[1] else {}
        seconds = self._clock() - begin
        if await self.current() != version or not own:
            self.found.skipped["weights_replaced"] += 1
        else:
            self.found.sequences += 1
            self.found.tokens["prefill"] += prompt
            self.found.tokens["decode"] += len(ids) - prompt
            self._sums = {site: self._sums.get(site, 0) + one for site, one in own.items()}
        self.found.seconds += seconds
        return seconds * (1 / self.found.cost - 1)

    async def replay(self, ids: list[int], prompt: int) -> dict[int, np.ndarray]:
        """``statistics.sums`` by site of a sequence, of which so many tokens were given."""
        asked = replays.ReplayRequest(
            ids, [*range(len(ids))], [site.index for site in self._places]
        )
        found = (await replays.replay(self._state, self._client, asked, [])).sites
        each = {at: np.frombuffer(own, np.float32) for at, (own, _) in found.items()}
        tables = {at: own.reshape(len(ids), -1) for at, own in each.items()}
        return {at: await asyncio.to_thread(sums, own, prompt) for at, own in tables.items()}


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
    """Count no further sequence; what was counted stays to be asked for."""
    if hasattr(request.app.state, "attn_res_statistics"):
        request.app.state.attn_res_statistics.end()
    return await statistics(request)


@router.get("")
async def statistics(request: Request) -> StatisticsAnswer:
    """What was counted since the start, and under which weights."""
    state = request.app.state
    if not hasattr(state, "attn_res_statistics"):
        return StatisticsAnswer(model=openai_app.served_names(state)[0])
    found: StatisticsAnswer = await state.attn_res_statistics.answer()
    return found
