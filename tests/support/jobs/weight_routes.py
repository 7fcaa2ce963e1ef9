"""A trainer's routes, as our server opens them, over the engine of a job."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from asgi import ask
from fastapi import FastAPI
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from attnres_serve.compat import tensor_file
from attnres_serve.server.routes import weights


class Core:
    """An engine core of this process, by the methods that vLLM's server calls."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._core, name.removesuffix("_async"))

        async def called(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return called


class Client(AsyncLLM):
    """vLLM's client of a server, for an engine that a job has started."""

    def __init__(self, engine: LLMEngine) -> None:
        self.vllm_config, self.output_processor = engine.vllm_config, engine.output_processor
        self.engine_core = Core(engine.engine_core.engine_core)  # type: ignore[assignment]

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing: the job ends its engine."""


def update(engine: LLMEngine, pairs: Iterable[tuple[str, Any]]) -> None:
    """Replace the weights of an engine, which nobody pauses.

    Raises:
        ValueError: a route refuses, with its sentence.
    """
    app = FastAPI()
    app.state.engine_client = Client(engine)
    weights.attach(app)
    post(app, "init_weight_transfer_engine", init_info={})
    post(app, "start_weight_update")
    with tensor_file.file_of(pairs) as path:
        post(app, "update_weights", update_info={"path": path})
    post(app, "finish_weight_update", weight_version="newer")


def post(app: FastAPI, route: str, **body: Any) -> None:
    headers = [("content-type", "application/json")]
    answer = ask(app, "POST", f"/{route}", headers, chunks=[json.dumps(body).encode()])
    if answer.status != 200:
        raise ValueError(answer.body.decode())
