"""Access lines: one for every request, with the tokens that the engine counted."""

import asyncio
import json
import logging
import logging.config
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from asgi import Client, ask
from fastapi import FastAPI, Request
from serving import ROOT
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse

pytest.importorskip("vllm")

from vllm.logging_utils import create_uvicorn_log_config
from vllm.sampling_params import RequestOutputKind, SamplingParams

from attnres_serve.compat import requests, token_counts
from attnres_serve.server import access_log
from attnres_serve.server.endpoints import log_access
from attnres_serve.server.lifecycle import Lifecycle
from attnres_serve.server.request_ids import RequestIds

ID = ("X-Request-Id", "order-7")
LINE = re.compile(
    r'^INFO: +\d{4}-\d\d-\d\dT[\d:]{8}[+-]\d{4} \S+ - "(?P<request>.*)" (?P<status>\d+).*? '
    r"\d+\.\d{3}s in=(?P<into>\S+) out=(?P<out>\S+) tok/s=(?P<rate>\S+) id=(?P<id>\S+)$"
)


class Engine:
    """Answers every prompt with ``n`` answers of 1, 2, ... tokens, one of each a step."""

    def __init__(self) -> None:
        self.pause = asyncio.sleep
        token_counts.count(self)

    async def generate(self, prompt, params, request_id: str) -> AsyncIterator:
        n = params.n or 1
        said: list[list[int]] = [[] for _ in range(n)]
        for step in range(n):
            await self.pause(0)
            new = [[step] if index >= step else [] for index in range(n)]
            for all_tokens, tokens in zip(said, new, strict=True):
                all_tokens += tokens
            kind, ends = params.output_kind, step == n - 1
            if kind == RequestOutputKind.FINAL_ONLY and not ends:
                continue
            shown = new if kind == RequestOutputKind.DELTA else said
            yield SimpleNamespace(
                prompt_token_ids=prompt,
                finished=ends,
                outputs=[
                    SimpleNamespace(index=index, token_ids=[*tokens])
                    for index, tokens in enumerate(shown)
                    if tokens or kind != RequestOutputKind.DELTA
                ],
            )


PROMPT = [1, 2, 3]


def app_of(engine: Engine, **arguments) -> FastAPI:
    app = FastAPI(middleware=[Middleware(RequestIds)])
    app.state.args = SimpleNamespace(**arguments)
    app.state.attn_res_lifecycle = Lifecycle()

    async def answers(request: Request, kind: RequestOutputKind) -> AsyncIterator[str]:
        n = int(request.query_params.get("n", 1))
        for number in range(int(request.query_params.get("prompts", 1))):
            name = request.query_params.get("name", "cmpl")
            params = SamplingParams(n=n, output_kind=kind)
            async for output in engine.generate(PROMPT, params, f"{name}-{number}"):
                yield str(output.finished)

    async def whole(request: Request, kind: RequestOutputKind) -> list[str]:
        async def collect(*_) -> list[str]:
            return [one async for one in answers(request, kind)]

        await request.body()
        return await requests.until_disconnect(collect, None, request)

    @app.post("/final")
    async def final(request: Request) -> list[str] | None:
        return await whole(request, RequestOutputKind.FINAL_ONLY)

    @app.post("/cumulative")
    async def cumulative(request: Request) -> list[str] | None:
        return await whole(request, RequestOutputKind.CUMULATIVE)

    @app.post("/stream")
    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(answers(request, RequestOutputKind.DELTA))

    @app.get("/fault")
    async def fault() -> None:
        raise ValueError("a fault")

    async def answer(status: int = 200) -> PlainTextResponse:
        return PlainTextResponse("", status)

    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        app.add_api_route(path, answer)
    log_access(app)
    return app


class Lines:
    """What handlers of uvicorn's logger wrote."""

    def __init__(self) -> None:
        self.text: list[str] = []

    def write(self, text: str) -> None:
        self.text += text.splitlines()

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False

    def only(self) -> re.Match:
        (line,) = self.text
        found = LINE.match(line)
        assert found, line
        return found


@contextmanager
def logging_by(config: dict, monkeypatch) -> Iterator[Lines]:
    """Configure uvicorn's loggers as it does, and leave them as they were."""
    lines, logger = Lines(), access_log.LOGGER
    before = [*logger.handlers], [*logger.filters], logger.level, logger.propagate
    monkeypatch.setattr(sys, "stdout", lines)
    logging.config.dictConfig(config)
    try:
        yield lines
    finally:
        logger.handlers[:], logger.filters[:], logger.level, logger.propagate = before


@pytest.fixture
def lines(monkeypatch) -> Iterator[Lines]:
    with logging_by(deepcopy(uvicorn.config.LOGGING_CONFIG), monkeypatch) as found:
        access_log._take_over()
        yield found


@pytest.mark.parametrize(
    ("query", "into", "out"),
    [("", 3, 1), ("?n=3", 3, 6), ("?prompts=2", 6, 2), ("?n=2&prompts=3", 9, 9)],
)
@pytest.mark.parametrize("path", ["/final", "/cumulative", "/stream"])
def test_tokens_are_those_of_the_engine(lines, path, query, into, out):
    assert ask(app_of(Engine()), "POST", path, [ID], query=query[1:]).status == 200
    found = lines.only()
    assert found["request"] == f"POST {path}{query} HTTP/1.1"
    assert (found["status"], found["into"], found["out"]) == ("200", str(into), str(out))
    assert float(found["rate"]) > 0 and found["id"] == "order-7"


def test_what_asked_no_engine_has_no_tokens(lines):
    answer = ask(app_of(Engine()), "GET", "/v1/models")
    found = lines.only()
    assert (found["into"], found["out"], found["rate"]) == ("-", "-", "-")
    assert found["id"] == answer.headers["x-request-id"]


def test_a_beam_search_counts_otherwise_than_its_client(lines):
    ask(app_of(Engine()), "POST", "/final", query="name=cmpl-beam")
    assert lines.only()["out"] == "-"


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/fault", 500), ("/final", 405)])
def test_what_fails_has_a_line(lines, path, status):
    app = app_of(Engine())
    try:
        ask(app, "GET", path, [ID])
    except ValueError:
        assert path == "/fault"  # of which starlette tells the server, too
    found = lines.only()
    assert (found["status"], found["id"]) == (str(status), "order-7")


@pytest.mark.parametrize(
    ("path", "leaves_at", "into", "out"),
    [
        *(("/stream", 1, "-", "-"), ("/stream", 2, "3", "2"), ("/stream", 4, "6", "5")),
        *(("/final", 2, "-", "-"), ("/final", 4, "3", "-"), ("/cumulative", 2, "3", "-")),
    ],
)
def test_a_client_that_leaves_has_a_line(lines, path, leaves_at, into, out):
    """Of an answer that would have come as a whole nobody counted the beginning."""
    engine = Engine()

    async def main() -> None:
        client = Client("POST", path, [ID], query="n=2&prompts=2")
        steps = 0

        async def pause(_: float) -> None:
            nonlocal steps
            steps += 1
            if steps == leaves_at:
                client.gone.set()
                await asyncio.Event().wait()

        engine.pause = pause
        await asyncio.wait_for(client.ask(app_of(engine)), 30)

    asyncio.run(main())
    found = lines.only()
    assert (found["status"], found["id"]) == ("499", "order-7")
    assert (found["into"], found["out"]) == (into, out)


# --- which requests have a line


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_have_a_line_only_where_they_fail(lines, path):
    app = app_of(Engine())
    assert ask(app, "GET", path).status == 200
    assert lines.text == []
    ask(app, "GET", path, query="status=503")
    assert lines.only()["status"] == "503"
    app.state.attn_res_lifecycle.stopping = True  # when probes are to fail
    ask(app, "GET", path, query="status=503")
    assert len(lines.text) == 1


@pytest.mark.parametrize(("said", "shown"), [("", 2), ("/ready,/metrics", 1), (None, 0)])
def test_probes_have_a_line_where_vllms_flag_says_so(monkeypatch, said, shown):
    paths = [path for path in (said or "").split(",") if path]
    with logging_by(create_uvicorn_log_config(paths), monkeypatch) as lines:
        access_log._take_over()
        app = app_of(Engine(), disable_access_log_for_endpoints=said)
        for path in ("/health", "/ready"):
            ask(app, "GET", path)
    assert len(lines.text) == shown


@pytest.mark.parametrize("level", [None, "DEBUG", "INFO", "WARNING"])
def test_uvicorn_speaks_of_the_server_unless_vllm_logs_warnings_alone(monkeypatch, level):
    server = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(server, "level", logging.INFO)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    access_log._take_over()
    assert server.level == (logging.WARNING if level == "WARNING" else logging.INFO)


def test_no_lines_where_uvicorn_would_have_none(monkeypatch):
    """By --disable-uvicorn-access-log, which takes the handlers away, and by the level."""
    with logging_by(deepcopy(uvicorn.config.LOGGING_CONFIG), monkeypatch) as lines:
        access_log._take_over()
        access_log.LOGGER.setLevel("WARNING")
        ask(app_of(Engine()), "GET", "/v1/models")
        access_log.LOGGER.setLevel("INFO")
        access_log.LOGGER.handlers.clear()
        ask(app_of(Engine()), "GET", "/v1/models")
    assert lines.text == []


# --- how a line is written


def test_a_line_is_json_by_the_file(monkeypatch):
    config = json.loads((ROOT / "deploy" / "logging.json").read_text())
    logger = logging.getLogger("uvicorn")
    before = [*logger.handlers], logger.level, logger.propagate
    access = deepcopy(uvicorn.config.LOGGING_CONFIG["loggers"]["uvicorn.access"])
    config["loggers"] = {"uvicorn": config["loggers"]["uvicorn"]}
    config["loggers"]["uvicorn.access"] = {**access, "handlers": [], "propagate": True}
    try:
        with logging_by(config, monkeypatch) as lines:
            access_log._take_over()
            for path in ("/a%b", "/final"):
                ask(app_of(Engine()), "POST", path, [ID])
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    first, second = (json.loads(line) for line in lines.text)
    assert (first["status"], first["tokens_in"], first["tokens_out"]) == (404, None, None)
    assert "%" in first["path"] and first["path"] in first["message"]
    assert second.pop("duration_s") < 30 and second.pop("tokens_per_s") > 0
    expected = {"method": "POST", "path": "/final", "status": 200, "request_id": "order-7"}
    assert {**expected, "tokens_in": 3, "tokens_out": 1}.items() <= second.items()
    assert "in=3 out=1" in second["message"]


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_uvicorn_writes_no_line_beside_it(monkeypatch, capsys, http):
    with logging_by(deepcopy(uvicorn.config.LOGGING_CONFIG), monkeypatch) as lines:
        config = uvicorn.Config(app_of(Engine()), port=0, http=http, log_level="info")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            client.post("/stream", headers=dict([ID])).raise_for_status()
            client.get("/health").raise_for_status()
        server.should_exit = True
        thread.join()
    assert lines.only()["out"] == "1"
    assert "Logging error" not in capsys.readouterr().err  # of a line that our format does not fit


@pytest.mark.parametrize("mine", ["%(status_code)s", "%(asctime)s %(message)s", "%(client_addr)s"])
def test_a_format_of_the_users_stays(monkeypatch, mine):
    config = deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["formatters"]["access"]["fmt"] = mine
    with logging_by(config, monkeypatch):
        access_log._take_over()
        (handler,) = access_log.LOGGER.handlers
        assert handler.formatter._fmt == mine
