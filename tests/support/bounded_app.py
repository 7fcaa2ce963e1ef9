"""A small app with routes named as a server's, under our key and bounds."""

import json
import re
from types import SimpleNamespace

from fastapi import FastAPI, Request, Response, WebSocket
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from attnres_serve.server.bounds.guard import PROBES
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.endpoints import protect

KEY = "a-key-of-the-test"
BEARER = ("Authorization", f"Bearer {KEY}")
JSON = ("Content-Type", "application/json; charset=utf-8")
DATA = (
    *("/v1/attn_res/trace", "/v1/completions", "/invocations", "/tokenize", "/start_profile"),
    *("/v1/attn_res", "/v1/responses", "/v1/attn_res/statistics", "/v1/attn_res/statistics/stop"),
    "/v1/attn_res/statistics/start",
)
PUBLIC = (*sorted(PROBES), "/", "/attn_res", "/attn_res/page.js")


def app_of(
    keys: tuple[str, ...] = (KEY,), host: str = "127.0.0.1", root_path: str = "", **bounds
) -> FastAPI:
    """An app with routes named as a server's; what reached one is in ``app.state.reached``."""
    app = FastAPI(root_path=root_path)
    reached = app.state.reached = []

    async def data(request: Request) -> Response:
        body = await request.body()
        reached.append((request.url.path, body))
        return PlainTextResponse(body)

    for path in DATA:
        app.add_api_route(path, data, methods=["GET", "POST", "PUT"])

    async def public() -> str:
        return "public"

    for path in PUBLIC:
        app.add_api_route(path, public, methods=["GET", "POST"])
    metrics = Mount("/metrics", PlainTextResponse("metrics"))
    metrics.path_regex = re.compile("^/metrics(?P<path>.*)$")  # as vLLM has it
    app.routes.append(metrics)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    app.state.args = SimpleNamespace(
        api_key=list(keys), host=host, attn_res_policy=Policy(**bounds)
    )
    protect(app)
    return app


def error_of(answer) -> str:
    """The sentence of an error of OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    return error["message"]


def body_of(**fields) -> bytes:
    return json.dumps(fields).encode()


ASKED = {"role": "user", "content": "a"}
BODIES = {
    "/v1/completions": {"model": "x", "prompt": "a"},
    "/v1/chat/completions": {"model": "x", "messages": [ASKED]},
    "/v1/chat/completions/batch": {"model": "x", "messages": [[ASKED]]},
    "/v1/responses": {"model": "x", "input": "a"},
}
