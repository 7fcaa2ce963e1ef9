"""What vLLM's routes cannot read is refused in one sentence."""

import json
import re

import pytest
import uvicorn
from asgi import ask
from fastapi import FastAPI
from pydantic import ValidationError

pytest.importorskip("vllm")

from bounded_app import BEARER, BODIES, JSON, body_of, error_of

from attnres_serve.server import refusal
from attnres_serve.server.bounds.headers import BoundedHeaders


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/v1/completions"])
def test_what_the_router_refuses_has_the_shape_of_the_others(vllms_app, path):
    answer = ask(vllms_app, "PUT", path, [BEARER])
    assert error_of(answer) == ("Method Not Allowed" if answer.status == 405 else "Not Found")
    assert answer.headers.get("allow") == ("POST" if answer.status == 405 else None)


def test_http_is_read_within_bounds(vllms_app):
    config = uvicorn.Config(vllms_app)
    config.load()
    assert config.http_protocol_class is BoundedHeaders


def test_vllm_counts_what_is_refused(vllms_app):
    """The bounds lie inside its metrics, so that they show how often they are met."""
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    def refused() -> float:
        text = generate_latest(get_prometheus_registry()).decode()
        rows = re.findall(
            r'^http_requests_total\{(?=.*"/tokenize")(?=.*"4xx").*\} (\S+)$', text, re.M
        )
        return sum(map(float, rows))

    before = refused()
    assert ask(vllms_app, "POST", "/tokenize").status == 401
    assert refused() == before + 1


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        *(("/v1/completions", {"structured_outputs": value}) for value in (True, "", [])),
        ("/v1/chat/completions", {"structured_outputs": 1.5}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
    ],
    ids=str,
)
def test_a_field_that_vllm_looks_into_too_soon_is_refused(vllms_app, path, wrong):
    body = body_of(**BODIES[path] | wrong)
    answer = ask(vllms_app, "POST", path, [BEARER, JSON], chunks=[body])
    assert answer.status == 400 and "another type than it should" in error_of(answer)


USER = {"role": "user", "content": "a"}

MISREAD = [
    (
        "/v1/completions",
        {"prompt": "a", "stop": [*"abcde"]},
        "stop: found 5 entries; expected at most 4; the server's variable VLLM_MAX_STOP_STRINGS "
        "allows more.",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "temperature": "hot", "n": "x"},
        'n: found "x"; expected a whole number.',
    ),
    (
        "/v1/completions",
        {"prompt": "a", "response_format": {"type": "foo"}},
        "response_format.type: found \"foo\"; expected 'text', 'json_object' or 'json_schema' or "
        "'structural_tag'.",
    ),
    ("/v1/completions", [1], "The body has to be a JSON object."),
    (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": 5}]}]},
        "messages[1].tool_calls[0].id: found 5; expected text.",
    ),
    ("/v1/completions", b"{", "The body is not valid JSON (Expecting property name"),
    ("/v1/completions", b"", "The body has to be"),
    ("/v1/responses", {"input": 5}, "input: found 5; expected text or a list."),
    ("/v1/responses", {"input": [{}]}, "input[0]."),
    ("/tokenize", {}, "prompt is missing; give it."),
]


@pytest.mark.parametrize(("path", "asked", "says"), MISREAD, ids=lambda one: str(one)[:50])
def test_a_body_that_vllm_cannot_read_is_refused_in_one_sentence(vllms_app, path, asked, says):
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    answer = ask(vllms_app, "POST", path, [BEARER, JSON], chunks=[body])
    said = error_of(answer)
    assert answer.status == 400 and said.startswith(says) and "\n" not in said
    assert len(said) < 300 and "validation error" not in said


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([{"type": "text", "text": 3}, {"type": "text"}], "messages[1].content[0].text"),
        ([5], "messages[1].content[0]"),
        ([{"type": "sound"}], "messages[1].content[0].type"),
    ],
)
def test_a_part_of_a_message_is_named_by_its_place(parts, field):
    """VLLM reads parts when it has begun to answer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    app = FastAPI()
    app.add_exception_handler(ValidationError, refusal.of_values)

    @app.post("/chat")
    async def chat(asked: ChatCompletionRequest) -> None:
        for message in asked.messages:
            list(message["content"])

    body = json.dumps({"messages": [USER, {"role": "user", "content": parts}]}).encode()
    answer = ask(app, "POST", "/chat", [JSON], chunks=[body])
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == field and error["message"].startswith((f"{field}: ", f"{field} is "))
