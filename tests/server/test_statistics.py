"""Statistics of what is served, with workers in this process in the place of an engine."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from starlette.requests import Request

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from attnres_serve.compat import engine_config, requests, token_counts
from attnres_serve.compat.workarounds.replacing_calls import CHANGED
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.routes.statistics import MOST, Collector, start, statistics, stop
from attnres_serve.tracing.statistics import StatisticsAnswer
from tests.server.test_trace_route import BLOCK, Client, app_of
from tests.server.test_trace_route import one_world as one_world  # a fixture
from tests.server.test_trace_route import trace as trace_route

URL = "/v1/attn_res/statistics"
SITES = sites(AttnResSpec.uniform(Layout.of(3), 2, 1e-6))
SECONDS = 0.5  # that a replay takes


class Bench(Collector):
    """A collector whose time is counted, not waited for, and whose replays are made up."""

    def __init__(self, cost: float = 0.02, limit: int = 100) -> None:
        self.replayed: list[tuple[list[int], int]] = []  # with the lengths of their prompts
        self.slept: list[float] = []
        self.version = "first"
        self.while_replayed: Callable[[], None] = lambda: None
        self.now = 0.0
        model = SimpleNamespace(base_model_paths=[SimpleNamespace(name="demo")])
        self.engine = SimpleNamespace(
            get_weight_version=self._told_version,
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False)),
        )
        args = SimpleNamespace(attn_res_policy=Policy(max_trace_tokens=limit))
        state = SimpleNamespace(args=args, engine_client=self.engine, openai_serving_models=model)
        super().__init__(state, list(SITES), cost, lambda: self.now, self._slept)

    async def replay(self, ids: list[int], prompt: int) -> dict[int, np.ndarray]:
        self.replayed.append((ids, prompt))
        self.now += SECONDS
        self.while_replayed()
        return {3: np.full((2, 2, 19), float(len(ids)))}

    async def _told_version(self) -> str:
        return self.version

    async def _slept(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def change(self) -> None:
        """Replace the weights."""
        self.version = "second"
        setattr(self.engine, CHANGED, 7.0)

    def act(self, *acts: Callable[[], Any]) -> StatisticsAnswer:
        """Do something after the other, and let the collector work in between."""

        async def main() -> None:
            await self.current()
            task = asyncio.create_task(self.run())
            for act in acts:
                act()
                for _ in range(8 * MOST):
                    await asyncio.sleep(0)
            await self.current()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        asyncio.run(main())
        return self.counts

    def ending(self, *lengths: tuple[int, int]) -> Callable[[], None]:
        """Requests of so many tokens of prompt and answer that come and end at once."""
        return lambda: [
            self.begin()([1] * prompt, [2] * answer) for prompt, answer in lengths
        ] and None  # fmt: skip


def test_what_is_counted():
    bench = Bench()
    found = bench.act(bench.ending((5, 2), (3, 0)), bench.ending((1, 4)))
    assert bench.replayed == [([1] * 5 + [2] * 2, 5), ([1] * 3, 3), ([1] + [2] * 4, 1)]
    assert (found.sequences, found.tokens["prefill"], found.tokens["decode"]) == (3, 9, 6)
    np.testing.assert_array_equal(bench._sums[3], np.full((2, 2, 19), 15.0))
    assert not any(found.skipped.values())


@pytest.mark.parametrize("cost", [0.02, 0.25, 1])
def test_replays_take_their_share(cost):
    """The seconds of replays, of those and of the waits behind them."""
    bench = Bench(cost)
    found = bench.act(bench.ending(*[(2, 1)] * 10))
    assert found.seconds == 10 * SECONDS
    assert found.seconds / (found.seconds + sum(bench.slept)) == pytest.approx(cost)
    assert len(bench.slept) == 10  # none follows another at once


def test_what_is_too_long_is_told():
    bench = Bench(limit=10)
    found = bench.act(bench.ending((9, 2), (9, 1)))
    assert found.sequences == 1 and found.skipped["too_long"] == 1


def test_a_full_queue_keeps_a_sample():
    """Of many that end at once all places have the same chance, and each is counted or told."""
    many, hits = 4 * MOST, np.zeros(4)
    for seed in range(20):
        bench = Bench(limit=10**6)
        random.seed(seed)
        found = bench.act(bench.ending(*((number, 1) for number in range(many))))
        assert found.sequences == len(bench.replayed) == MOST
        assert found.skipped["queue_full"] == many - MOST
        prompts = [prompt for _, prompt in bench.replayed]
        assert len(set(prompts)) == MOST
        hits += np.bincount(np.array(prompts) // MOST, minlength=4)
    # A newer one is likelier to be kept: e^-k of those k queues ago.
    np.testing.assert_allclose(hits / hits.sum(), np.exp([-3, -2, -1, 0]) * 0.64, atol=0.03)


def test_versions_do_not_mix():
    bench = Bench()

    take: list[Any] = []
    found = bench.act(
        bench.ending((5, 2)),
        lambda: take.append(bench.begin()),  # computed by both
        bench.change,
        lambda: take[0]([1] * 9, [2]),
        bench.ending((1, 1)),
    )
    assert found.restarts == 1 and found.weights == "second"
    assert (found.sequences, found.tokens["prefill"], found.tokens["decode"]) == (1, 1, 1)
    assert found.skipped["weights_replaced"] == 1
    np.testing.assert_array_equal(bench._sums[3], np.full((2, 2, 19), 2.0))


def test_weights_that_come_during_a_replay():
    bench = Bench()

    bench.while_replayed = bench.change
    found = bench.act(bench.ending((5, 2)))
    assert found.restarts == 1 and found.sequences == 0 and not bench._sums
    assert found.skipped["weights_replaced"] == 1


def test_two_starts_leave_one_collector(monkeypatch):
    bench = Bench()

    async def places_of(client: Any) -> Any:
        return list(SITES)

    async def version() -> str:
        await asyncio.sleep(0)
        return "first"

    monkeypatch.setattr(trace_route, "places_of", places_of)
    monkeypatch.setattr(engine_config, "is_only_api_server", lambda config: True)
    bench.engine.get_weight_version = version
    request: Any = SimpleNamespace(app=SimpleNamespace(state=bench._state))

    async def main() -> None:
        await asyncio.gather(start(request), start(request))
        await asyncio.sleep(0)  # the first one's task ends
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        assert (await statistics(request)).running
        await stop(request)
        await asyncio.sleep(0)
        assert task.done() and token_counts.listener is None

    asyncio.run(main())


def test_a_replay_that_fails_ends_them():
    bench = Bench()

    def fail() -> None:
        raise HTTPException(500, "Site 3 is wrong.")

    bench.act(bench.ending((5, 2)))
    bench.counts.running, bench.while_replayed = True, fail
    found = bench.act(bench.ending((5, 2), (4, 1)))
    assert not found.running and found.problem == "Site 3 is wrong."
    assert found.sequences == 1


class Serving(Client):
    """Answers with the tokens that a prompt's own ids say, in the way that is asked for."""

    async def generate(self, prompt, params, name: str):
        ids = prompt["prompt_token_ids"]
        self.names.append(name)
        answer = [token + 1 for token in ids[:3]]
        for end in range(1, len(answer) + 1):
            is_end = end == len(answer)
            if params.output_kind == RequestOutputKind.FINAL_ONLY and not is_end:
                continue
            is_delta = params.output_kind == RequestOutputKind.DELTA
            own = answer[end - 1 : end] if is_delta else answer[:end]
            reason = self.ended_by if is_end else None
            made = [
                SimpleNamespace(index=index, token_ids=own, finish_reason=reason)
                for index in range(params.n)
            ]
            yield SimpleNamespace(outputs=made, prompt_token_ids=ids, finished=is_end)


@pytest.fixture
def client() -> Serving:
    return Serving(BLOCK)


@pytest.fixture
def app(client):
    app = app_of(client)
    app.app.post("/ask")(ask)
    with app:  # one loop for all requests
        yield app
    token_counts.listener = None


async def ask(request: Request) -> int:
    """A request as vLLM's routes have it; how many outputs it read."""
    body = await request.json()
    kind = RequestOutputKind[body.get("kind", "FINAL_ONLY")]
    prompt, params = requests.greedy(body["ids"], 3)
    params = SamplingParams(n=body.get("n", 1), output_kind=kind)
    if "embeds" in body:
        prompt["prompt_embeds"] = None
    outputs = 0
    async for _ in request.app.state.engine_client.generate(prompt, params, body["name"]):
        outputs += 1
        if outputs == body.get("leaves"):
            break
    return outputs


def served(app, ids: list[int], name: str = "cmpl-1", **options: Any) -> list[int]:
    app.post("/ask", json={"ids": ids, "name": name, **options}).raise_for_status()
    return [*ids, *(token + 1 for token in ids[:3])]


def counted(app, sequences: int) -> dict[str, Any]:
    for _ in range(500):
        found = app.get(URL).raise_for_status().json()
        if found["sequences"] >= sequences or found["problem"]:
            break
    assert found["sequences"] == sequences, found
    return found


def mean_of_traces(app, sequences: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    """Mean weights and entropies of every site, over the tokens of prompts and of answers."""
    tables: list[dict[str, Any]] = []
    for ids, prompt in sequences:
        found = app.post("/v1/attn_res/trace", json={"prompt": ids}).raise_for_status().json()
        for at, site in enumerate(found["sites"]):
            if at == len(tables):
                tables.append({name: ([], []) for name in ("prefill", "decode")})
            for name, rows in (("prefill", slice(prompt)), ("decode", slice(prompt, None))):
                tables[at][name][0].extend(site["weights"][rows])
                tables[at][name][1].extend(site["entropy"][rows])
    return tables


def check(found: dict[str, Any], tables: list[dict[str, Any]]) -> None:
    """That statistics are those of the traces, to their six digits."""
    assert len(found["sites"]) == len(tables) > 0
    for site, table in zip(found["sites"], tables, strict=True):
        for name in ("prefill", "decode"):
            weights, entropy = (np.array(part) for part in table[name])
            assert len(weights) == found["tokens"][name]
            np.testing.assert_allclose(site[name]["mean"], weights.mean(0), atol=1e-5)
            np.testing.assert_allclose(site[name]["second_moment"], (weights**2).mean(0), atol=1e-5)
            assert site[name]["entropy"] == pytest.approx(entropy.mean(), abs=1e-5)
            assert np.sum(site[name]["histogram"], 1).tolist() == [len(weights)] * len(weights[0])


def test_every_answer_is_counted_once(app):
    """Streams, whole answers and several of one prompt, as their traces have them."""
    assert app.get(URL).json()["running"] is False
    served(app, [3, 4, 5, 6])
    assert app.post(f"{URL}/start", json={"cost": 1}).json()["running"] is True
    kinds = [kind.name for kind in RequestOutputKind]
    whole = [(served(app, [7 + at, 5, 4, 9], kind=kind), 4) for at, kind in enumerate(kinds)]
    served(app, [8, 1], n=2)
    whole += [([8, 1, 9, 2], 2)] * 2
    found = counted(app, 5)
    assert found["tokens"] == {"prefill": 3 * 4 + 2 * 2, "decode": 3 * 3 + 2 * 2}
    assert found["restarts"] == 0 and found["seconds"] > 0
    check(found, mean_of_traces(app, whole))
    stopped = app.post(f"{URL}/stop").json()
    assert stopped | {"running": True} == found
    served(app, [3, 4, 5, 6])
    assert app.get(URL).json() == stopped


def test_what_is_no_answer_of_a_client(app, client):
    app.post(f"{URL}/start", json={"cost": 1}).raise_for_status()
    served(app, [3, 4, 5], leaves=1, kind="DELTA")
    served(app, [3, 4, 5], name="cmpl-2-beam-0")
    served(app, [3, 4, 5], embeds=True)
    app.post("/v1/attn_res/trace", json={"prompt": [3], "max_tokens": 1}).raise_for_status()
    client.ended_by = "abort"
    served(app, [3, 4, 5])
    client.ended_by = "stop"
    served(app, [6, 7])
    assert counted(app, 1)["tokens"] == {"prefill": 2, "decode": 2}


def test_nothing_is_kept_while_they_are_off(app, client):
    """The engine's outputs go by as they are; a request that began before is not told."""
    answers = client.generate(*requests.greedy([3], 1), "cmpl-1")
    assert answers.__qualname__.startswith("Serving")
    app.post(f"{URL}/start").raise_for_status()
    app.post(f"{URL}/stop").raise_for_status()
    assert client.generate(*requests.greedy([3], 1), "x").__qualname__.startswith("Serving")


def test_new_weights_begin_anew(app, client):
    app.post(f"{URL}/start", json={"cost": 1}).raise_for_status()
    served(app, [3, 4, 5])
    counted(app, 1)
    setattr(client, CHANGED, 5.0)

    async def version() -> str:
        return "second"

    client.get_weight_version = version
    found = counted(app, 0)
    assert found["weights"] == "second" and found["restarts"] == 1 and found["sites"] == []
    served(app, [3, 4])
    assert counted(app, 1)["tokens"] == {"prefill": 2, "decode": 2}


def test_a_site_that_gives_something_else_ends_them(app, client, monkeypatch):
    app.post(f"{URL}/start", json={"cost": 1}).raise_for_status()
    ask_workers = requests.ask_workers

    async def wrong(client, method, *words):
        found = await ask_workers(client, method, *words)
        return (
            [found[0], found[1] | {"problem": "site 3 is wrong."}]
            if method == "attn_res_trace"
            else found
        )

    monkeypatch.setattr(requests, "ask_workers", wrong)
    served(app, [3, 4, 5])
    found = counted(app, 0)
    for _ in range(500):
        found = app.get(URL).json()
    assert found["problem"] == "Site 3 is wrong." and found["running"] is False


@pytest.mark.parametrize(
    ("traces", "servers", "cost", "status", "said"),
    [
        *((True, 1, cost, 400, "cost") for cost in (0, -1, 1.5, "a")),
        (False, 1, 0.1, 403, "--disable-trace"),
        (True, 2, 0.1, 501, "one API server"),
    ],
)
def test_a_start_that_is_refused(app, client, monkeypatch, traces, servers, cost, status, said):
    monkeypatch.setattr(trace_route.settings, "traces", lambda _: traces)
    monkeypatch.setattr(client.vllm_config.parallel_config, "_api_process_count", servers)
    answer = app.post(f"{URL}/start", json={"cost": cost})
    assert answer.status_code == status and said in answer.json()["error"]["message"]
    assert app.get(URL).json()["running"] is app.post(f"{URL}/stop").json()["running"] is False
