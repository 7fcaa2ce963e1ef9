"""An answer names the weights that computed it, whatever its form."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient

from attnres_serve.compat import token_counts
from attnres_serve.server.weight_versions import KEY, WeightVersions

EVENTS = {  # the last one of each ends an answer
    "/v1/chat/completions": [
        'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"é"},"finish_reason":null}]}',
        'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}',
    ],
    "/v1/responses": [
        'event: response.created\ndata: {"type":"response.created"}',
        'event: response.completed\ndata: {"type":"response.completed"}',
    ],
    "/v1/messages": [
        'event: ping\ndata: {"type":"ping"}',
        'event: message_delta\ndata: {"type":"message_delta","delta":{}}',
    ],
}


def client_of(*versions: str) -> SimpleNamespace:
    """An engine that answers with the weights of these versions, one after the other."""

    async def generate(prompt, sampling_params, request_id):
        spans = [SimpleNamespace(version=version) for version in versions]
        output = SimpleNamespace(index=0, token_ids=[1], weight_versions=spans or None)
        yield SimpleNamespace(prompt_token_ids=[1], outputs=[output], finished=True)

    client = SimpleNamespace(generate=generate)
    token_counts.count(client)
    return client


def app_of(client: SimpleNamespace) -> TestClient:
    app = FastAPI()
    app.add_middleware(WeightVersions)

    async def compute() -> None:
        async for _ in client.generate([1], SimpleNamespace(output_kind=None), "a"):
            pass

    @app.post("/v1/completions")
    async def completions(prompts: int = 1) -> JSONResponse:
        for _ in range(prompts):
            await compute()
        return JSONResponse({"choices": [{"text": "é", "logprob": -0.1234567890123}]})

    @app.get("/v1/attn_res/trace")
    async def trace() -> JSONResponse:
        await compute()
        return JSONResponse({})

    @app.get("/text")
    async def text() -> PlainTextResponse:
        await compute()
        return PlainTextResponse("{}")

    def streaming(events: list[str]) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            for event in events[:-1]:
                yield f"{event}\n\n"
            await compute()
            yield f"{events[-1]}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    for path, events in EVENTS.items():
        app.add_api_route(path, lambda events=events: streaming(events))
    return TestClient(app)


@pytest.mark.parametrize("versions", [(), ("one",), ("one", "two")])
@pytest.mark.parametrize("prompts", [0, 1, 3])
def test_a_whole_answer(versions, prompts):
    found = app_of(client_of(*versions)).post(f"/v1/completions?prompts={prompts}")
    answer = {"choices": [{"text": "é", "logprob": -0.1234567890123}]}
    assert found.json() == answer | ({KEY: [*versions]} if versions and prompts else {})
    assert int(found.headers["content-length"]) == len(found.content)


@pytest.mark.parametrize("path", EVENTS)
def test_the_event_that_ends_an_answer(path):
    plain = app_of(client_of()).get(path).text
    assert plain == "".join(f"{event}\n\n" for event in [*EVENTS[path], "data: [DONE]"])
    named = app_of(client_of("one", "two")).get(path).text
    (line,) = set(named.splitlines()) - set(plain.splitlines())
    before, key = plain.splitlines(), json.loads(line.removeprefix("data: "))
    assert key.pop(KEY) == ["one", "two"]
    assert f"data: {json.dumps(key, separators=(',', ':'))}" in before
    assert len(named.splitlines()) == len(before)


@pytest.mark.parametrize("path", ["/v1/attn_res/trace", "/text"])
def test_a_trace_and_what_is_no_json_are_left(path):
    app = app_of(client_of("one"))
    assert app.get(path).text == "{}"
    assert app.get("/nowhere").status_code == 404
