"""The routes of edits and statistics, as our server opens them, over the engine of a job."""

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import asgi
from fastapi import FastAPI
from vllm.v1.engine.llm_engine import LLMEngine
from weight_routes import Client

from attnres_serve.compat import token_counts
from attnres_serve.server.routes import edits, statistics

Answer = dict[str, Any]
HEADERS = [("content-type", "application/json")]
COUNTED = "/v1/attn_res/statistics"


class Routes:
    """Both routes of one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.app = FastAPI()
        state = self.app.state
        state.args, state.engine_client = SimpleNamespace(), Client(engine)
        names = [SimpleNamespace(name="served")]
        state.openai_serving_models = SimpleNamespace(base_model_paths=names)
        edits.attach(self.app)
        self.app.include_router(statistics.router)

    async def ask(self, method: str, path: str, **body: Any) -> Any:
        chunks = [json.dumps(body).encode()]
        answer = await asgi.Client(method, path, HEADERS, chunks).ask(self.app)
        assert answer.status == 200, answer.body
        return answer.json()

    def put(self, wanted: list[dict[str, Any]]) -> str:
        """Serve under other edits; the version of weights and edits."""
        answer = asyncio.run(self.ask("PUT", edits.PATH, edits=wanted))
        assert answer["edits"] == wanted
        version: str = answer["version"]
        return version

    def statistics(self, sequences: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
        """Those of prompts and their answers, which are told as the server's engine does."""

        async def count() -> dict[str, Any]:
            self.app.state.attn_res_replays = asyncio.Lock()
            await self.ask("POST", f"{COUNTED}/start", cost=1)
            assert token_counts.listener is not None
            for prompt, answer in sequences:
                token_counts.listener()(prompt, answer)
            found: dict[str, Any] = {"problem": None, "sequences": 0}
            while found["problem"] is None and found["sequences"] < len(sequences):
                await asyncio.sleep(0.01)
                found = await self.ask("GET", COUNTED)
            stopped: dict[str, Any] = await self.ask("POST", f"{COUNTED}/stop")
            return stopped

        return asyncio.run(count())


def changed(
    engine: LLMEngine,
    puts: Sequence[list[dict[str, Any]]],
    prompts: Sequence[list[int]],
    ask: Callable[[list[int], bool], Answer],
) -> list[dict[str, Any]]:
    """What an engine that has answered the prompts says under edits that take each other's place.

    Args:
        engine: the engine.
        puts: edits, one set after the other.
        prompts: what is asked under each of them.
        ask: answers a prompt, with the logprobs of its tokens or without.

    Returns:
        Of each set its ``version``; the answer to the longest prompt, which is in the prefix cache
        from before, without logprobs of the prompt, for which the cache would be passed by:
        ``first``; those to all prompts with them: ``alone``; ``cached``, by the new cache; and the
        ``statistics`` of ``alone``.
    """
    routes, longest, found = Routes(engine), max(prompts, key=len), []
    for wanted in puts:
        one: dict[str, Any] = {"version": routes.put(wanted), "first": ask(longest, False)}
        one["alone"] = [ask(prompt, True) for prompt in prompts]
        one["cached"] = ask(longest, False)
        answers = [answer["tokens"] for answer in one["alone"]]
        one["statistics"] = routes.statistics([*zip(prompts, answers, strict=True)])
        found.append(one)
    return found
