"""Keys, hostile paths and bounds, on small apps and on vLLM's own without an engine."""

import asyncio
import gc
import gzip
import json
import math
import pickle
import re
import sys
import time
import tracemalloc
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from asgi import Client, ask
from cost import of_a_start
from fastapi import FastAPI, Request, Response, WebSocket
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving import GOLDENS
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

pytest.importorskip("vllm")

from attnres_serve import cli
from attnres_serve.compat import openai_app, openai_server, requests
from attnres_serve.compat.workarounds import ids_without_row, unsendable, worker_limits
from attnres_serve.server import launcher, refusal
from attnres_serve.server.bounds import fail_fast, guard, limits, reading
from attnres_serve.server.bounds.guard import PAGE, PROBES, ROOT, is_local
from attnres_serve.server.bounds.headers import BoundedHeaders
from attnres_serve.server.bounds.policy import Policy, read_keys
from attnres_serve.server.endpoints import protect
from attnres_serve.start import events

KEY = "a-key-of-the-test"
BEARER = ("Authorization", f"Bearer {KEY}")
JSON = ("Content-Type", "application/json; charset=utf-8")
GOLDEN = str(GOLDENS / "fla_transformer_block")
DATA = (
    *("/v1/attn_res/trace", "/v1/completions", "/invocations", "/tokenize", "/start_profile"),
    *("/v1/attn_res", "/v1/responses", "/v1/attn_res/statistics", "/v1/attn_res/statistics/stop"),
    "/v1/attn_res/statistics/start",
)
PUBLIC = (*sorted(PROBES), "/", "/attn_res", "/attn_res/page.js")


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


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


# --- keys


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", [*DATA, "/nowhere", "/metrics", "/docs", "/openapi.json"])
def test_all_but_the_probes_and_the_page_ask_for_a_key(path, method):
    app = app_of()
    answer = ask(app, method, path)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "API key" in error_of(answer)
    assert not app.state.reached


@pytest.mark.parametrize("path", PUBLIC)
def test_the_probes_and_the_page_do_not(path):
    assert ask(app_of(), "GET", path).status == 200


@pytest.mark.parametrize("path", ["/", "/attn_res", "/attn_res/page.js"])
def test_the_page_is_open_to_who_reads_it_alone(path):
    """A body would take a place among the requests at a time."""
    assert ask(app_of(), "POST", path).status == 401


NO_KEY, ANOTHER = "This route needs an API key; ", "This is not an API key of this server; "


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *((value, None) for value in (f"Bearer {KEY}", f"bearer {KEY}", "Bearer another")),
        *((f"Bearer {key}", ANOTHER) for key in (f"{KEY} ", f" {KEY}", KEY.upper(), KEY[:-1])),
        *((f"Bearer {key}", ANOTHER) for key in ("\xe4\U0001f511", "None", f"{KEY}{KEY}")),
        *((value, NO_KEY) for value in (f"Basic {KEY}", KEY, "Bearer", "Bearer ", "Bearer  ", "")),
    ],
)
def test_only_a_key_opens(value, says):
    """Of another one the sentence says no more than that, however near it is."""
    app = app_of(keys=(KEY, "another"))
    answer = ask(app, "POST", DATA[0], [("Authorization", value)])
    assert answer.status == (401 if says else 200)
    assert len(app.state.reached) == (not says)
    if says:
        whole = {NO_KEY: guard.MISSING, ANOTHER: guard.WRONG}[says]
        assert error_of(answer) == whole and whole.startswith(says)
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_first_of_two_authorizations_counts():
    """As in vLLM's own middleware; a proxy in front may have looked at that one only."""
    headers = [("Authorization", "Bearer another"), BEARER]
    assert ask(app_of(), "POST", DATA[0], headers).status == 401


def test_without_a_key_everything_is_open():
    app = app_of(keys=())
    assert ask(app, "POST", DATA[0]).status == 200
    assert ask(app, "GET", "/metrics").status == 200


def test_the_key_of_the_environment(monkeypatch):
    """vLLM's own variable; its flag has precedence."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert ask(app_of(keys=()), "POST", DATA[0]).status == 401
    assert ask(app_of(keys=()), "POST", DATA[0], [BEARER]).status == 200
    assert ask(app_of(keys=("another",)), "POST", DATA[0], [BEARER]).status == 401


def test_metrics_by_a_flag():
    app = app_of(public_metrics=True)
    assert ask(app, "GET", "/metrics").status == 200
    for path in ("/metrics/", "/metricsx", "/metrics/../v1/completions"):
        assert ask(app, "GET", path).status == 401
    assert ask(app_of(), "GET", "/metrics", [BEARER]).status == 200


def test_a_websocket_asks_for_a_key():
    client = TestClient(app_of())
    with (
        pytest.raises(WebSocketDisconnect) as caught,
        client.websocket_connect("/v1/realtime"),
    ):
        pass
    assert caught.value.code == 1008
    with client.websocket_connect("/v1/realtime", headers=dict([BEARER])):
        pass


@pytest.mark.parametrize("allowed", [[], ["https://a.example"]])
def test_cors_is_answered_before_the_key(allowed):
    """A browser asks first and without the key; what is not allowed learns nothing."""
    app = app_of()
    app.add_middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"])
    headers = [("Origin", "https://a.example"), ("Access-Control-Request-Method", "POST")]
    answer = ask(app, "OPTIONS", DATA[0], headers)
    assert answer.status == (200 if allowed else 400)
    assert answer.headers.get("access-control-allow-origin") == (allowed[0] if allowed else None)
    assert not app.state.reached


# --- hostile paths and hosts

NAMES = ["v1", "V1", "attn_res", "trace", "completions", "invocations", "health", "HEALTH", "ping"]
ODD = ["", ".", "..", "%2e%2e", "..;", "metrics", "api", "*", "\\", "v1%2fcompletions", "\x00"]
paths = st.lists(st.sampled_from([*NAMES, *ODD]), max_size=6).flatmap(
    lambda names: st.tuples(
        st.sampled_from(["/", "//", ""]),
        st.just("/".join(names)),
        st.sampled_from(["", "/", "//", ";", "?", "%00"]),
    ).map("".join)
)
hosts = st.sampled_from(
    ["127.0.0.1", "evil.example", "health", "/health", "[::1", "a b", "", "localhost:/v1", "%2f"]
)


@given(
    path=paths,
    host=hosts,
    method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT"]),
    root_path=st.sampled_from(["", "/api", "/v1", "/health", "/attn_res"]),
    of_server=st.booleans(),
    public_metrics=st.booleans(),
)
@example("//v1/attn_res/trace", "", "POST", "", False, False)
@example("/v1/attn_res/trace", "", "POST", "/attn_res", False, False)
@example("/attn_res/v1/attn_res/trace", "", "POST", "/attn_res", True, False)
@example("/health/../v1/attn_res/trace", "", "POST", "/health", True, True)
@example("/attn_res/../v1/attn_res/trace", "", "POST", "", True, True)
@example("/healthv1/attn_res/trace", "", "POST", "/health", True, True)
@settings(max_examples=150, deadline=None)
def test_no_path_and_no_host_gets_around_the_key(
    path, host, method, root_path, of_server, public_metrics
):
    """However the path is written, and wherever the app is mounted, by itself or by a server."""
    app = app_of(root_path="" if of_server else root_path, public_metrics=public_metrics)
    where = root_path if of_server else ""
    ask(app, method, path, [("Host", host)], root_path=where)
    assert not app.state.reached


def test_data_routes_behind_a_root_path():
    """The probes stay public there, by the name that the router knows."""
    app = app_of(root_path="/api")
    for path in ("/api/v1/attn_res/trace", "/v1/attn_res/trace"):
        assert ask(app, "POST", path).status == 401
        assert ask(app, "POST", path, [BEARER]).status == 200
    assert ask(app, "GET", "/api/health").status == ask(app, "GET", "/health").status == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("a.localhost", True),
        ("[::1]:8000", True),
        ("10.0.0.1", True),
        ("", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:8000", False),
        ("evil.example#127.0.0.1", False),
        ("127.0.0.1@evil.example", False),
        ("[::1", True),
        ("\xff", False),
    ],
)
def test_a_name_that_others_own_is_refused_on_loopback(host, local):
    """A site whose name points to 127.0.0.1 has scripts in browsers that ask us as their own."""
    assert is_local(host.encode()) is local
    open_app = app_of(keys=())
    answer = ask(open_app, "POST", DATA[0], [("Host", host)])
    assert answer.status == (200 if local else 400)
    if not local:
        assert "loopback" in error_of(answer)
    for app in (app_of(), app_of(keys=(), host="0.0.0.0"), app_of(keys=(), host="a.example")):
        assert ask(app, "POST", DATA[0], [("Host", host), BEARER]).status == 200


def test_no_key_beyond_loopback_is_said(warned):
    app_of(keys=())
    app_of(host="0.0.0.0")
    assert not warned
    app_of(keys=(), host="0.0.0.0")
    assert len(warned) == 1 and "no API key" in warned[0]


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"host": "127.0.0.1"}, "loopback"),
        ({"host": "::1"}, "loopback"),
        ({"host": "localhost"}, "loopback"),
        ({"host": "127.0.0.1", "uds": "/run/x"}, "file"),
        ({"host": None}, "network"),
        ({"host": "0.0.0.0"}, "network"),
        ({"host": "a.example"}, "network"),
        ({}, "network"),
    ],
)
def test_what_reaches_the_server(args, place):
    assert openai_server.listens_on(SimpleNamespace(**args)) == place


# --- bodies

LIMIT = 1000


@given(
    chunks=st.lists(st.integers(0, 700), max_size=8),
    declared=st.sampled_from([None, "true", "0", "1000", "1001", "9" * 30, "x", "-5", "1e9"]),
)
@example([1000], "true")
@example([1001], "true")
@example([500, 500, 1], None)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_size_of_a_body(chunks, declared):
    """Whatever the header says, no more than the limit is kept; all of a body arrives or none."""
    app = app_of(max_body_bytes=LIMIT)
    parts = [bytes([65 + index]) * size for index, size in enumerate(chunks)]
    total = sum(chunks)
    length = str(total) if declared == "true" else declared
    headers = [BEARER] if length is None else [BEARER, ("Content-Length", length)]
    answer = ask(app, "POST", DATA[0], headers, chunks=parts)
    is_declared = length and length.isdigit() and int(length) > LIMIT
    if total > LIMIT or is_declared:
        assert answer.status == 413 and str(LIMIT) in error_of(answer)
        assert not app.state.reached
        assert answer.taken <= (0 if is_declared else LIMIT + 700)
    else:
        assert answer.status == 200
        assert app.state.reached == [(DATA[0], b"".join(parts))]


@pytest.mark.parametrize("path", [*DATA, "/attn_res", "/attn_res/page.js", "/metrics"])
def test_no_body_is_read_without_the_key(path):
    answer = ask(app_of(public_metrics=True), "POST", path)
    assert (answer.status, answer.taken) == (401, 0)


def test_a_body_that_does_not_arrive(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
    app = app_of(max_concurrent_requests=1)
    answer = ask(app, "POST", DATA[0], [BEARER], ends=False)
    assert answer.status == 408 and "did not arrive" in error_of(answer)
    assert ask(app, "POST", DATA[0], [BEARER]).status == 200


def test_a_client_that_leaves_while_it_sends():
    app = app_of(max_concurrent_requests=1)
    answer = ask(app, "POST", DATA[0], [BEARER], chunks=[b"{"], ends=False, stays=False)
    assert answer.status is None and not app.state.reached
    assert ask(app, "POST", DATA[0], [BEARER]).status == 200


# --- sequences


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"prompt": ["a", "b"], "n": 5}, 10),
        ({"prompt": "a", "n": 7}, 7),
        ({"prompt": "a", "n": 2, "best_of": 8}, 2),  # which vLLM does not read
        ({"prompt": "a", "n": "12"}, 12),
        ({"prompt": "a", "n": "12.0"}, 12),
        ({"prompt": "a", "n": "1_2"}, 12),
        ({"prompt": "a", "n": 12.0}, 12),
        ({"prompt": "a", "n": 10**400}, math.inf),
        ({"prompt": "a", "n": 0}, 1),
        ({"prompt": "a", "n": -3}, 1),
        ({"prompt": "a", "n": None}, 1),
        ({"token_ids": [1], "sampling_params": {"n": 7}}, 7),
        ({"prompt": "a", "n": [9]}, 1),
        ({"messages": [{"role": "user", "content": "a"}] * 3, "n": 2}, 2),
        ({"messages": [[{"role": "user"}]] * 3}, 3),
        ({"query": "a", "items": ["b"] * 4}, 4),
        ({"state": "a", "questions": {"b": {}, "c": {}}}, 2),
        ({"items": ["b"] * 4, "n": "nan"}, 4),
        ({"n": math.nan, "sampling_params": {"n": 7}}, 7),
        ([1], 1),
        ("a", 1),
    ],
)
def test_sequences_of_a_request(body, count):
    text = json.dumps(body)
    if isinstance(body, dict) and body.get("n") == 10**400:
        text = '{"prompt": "a", "n": 1' + "0" * 400 + "}"
    assert limits.sequences(json.loads(text)) == count


@pytest.mark.parametrize("body", [b"", b"{", b"a=b", b'{"n": 9,}'])
def test_what_is_no_json_is_left_to_the_route(body):
    app = app_of()
    assert ask(app, "POST", DATA[0], [BEARER, JSON], chunks=[body]).status == 200
    assert app.state.reached == [(DATA[0], body)]


DEPTHS = (150, *range(900, 1000, 5), 1000, 2000, 100_000)


def nested(depth: int) -> bytes:
    """A body of this depth that no route can take for another reason too."""
    inner = depth - 1
    return b'{"prompt": {}, "metadata": %s}' % (b"[" * inner + b"]" * inner)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/tokenize", "/inference/v1/abort_requests", "/v1/attn_res/trace"),
    ],
)
def test_json_of_any_depth_is_refused_in_a_sentence(vllms_app, path):
    """How deep a route can read depends on where it is called from."""
    for depth in DEPTHS:
        answer = ask(vllms_app, "POST", path, [BEARER, JSON], chunks=[nested(depth)])
        assert answer.status == 400 and "\n" not in error_of(answer), depth
    assert "nested too deep" in error_of(answer)


def test_json_that_is_not_too_deep():
    app = app_of()
    for body in (nested(500), b"[%s1]" % (b"[]," * 100_000), b'"%s"' % (b"[{" * 10_000)):
        assert ask(app, "POST", DATA[0], [BEARER, JSON], chunks=[body]).status == 200


def body_of(**fields) -> bytes:
    return json.dumps(fields).encode()


MANY = 100_000
WRONG = [  # of which pydantic would make ten thousands of errors and more, of some millions
    ("/v1/completions", {"prompt": [[]] * MANY}),
    ("/v1/completions", {"prompt": "a", "bad_words": [1] * MANY}),
    ("/v1/chat/completions", {"messages": [{}] * MANY}),
    ("/v1/messages", {"messages": [{}] * MANY}),
    ("/v1/responses", {"input": [{}] * MANY}),
    *(("/v1/responses", {"input": [{name: [{}] * MANY}]}) for name in ("tools", "content")),
    ("/v1/responses", {"input": [{"tools": [{}] * 100}] * 50}),
    ("/tokenize", {"messages": [{}] * MANY}),
    ("/inference/v1/generate", {"token_ids": ["a"] * MANY, "sampling_params": {}}),
    ("/v1/attn_res/trace", {"prompt": [-1] * MANY}),
]


@pytest.mark.parametrize(("path", "asked"), WRONG, ids=lambda one: str(one)[:50])
def test_what_is_wrong_many_times_is_refused_soon(vllms_app, path, asked):
    """And of little memory: what gets through to vLLM's own check ends at the first error.

    Soon is less than an import of torch takes here; millions of errors take minutes.  Memory is
    that of Python's objects, alike on every machine: JSON makes 100 000 objects of 64 bytes and a
    list, 7 MB, and pydantic some kB of each error, so hundreds of MB.
    """
    from vllm import __version__

    request, chunks = ("POST", path, [BEARER, JSON]), [body_of(**asked)]
    begin = time.process_time()
    answer = ask(vllms_app, *request, chunks=chunks)
    assert time.process_time() - begin < of_a_start()
    # vLLM 0.28 repeats what is wrong for each of the kinds that it might have been.
    longest = 2**23 if __version__.startswith("0.28.") else 2**20
    assert answer.status == 400 and len(error_of(answer)) < longest
    tracemalloc.start()  # which makes it slower
    ask(vllms_app, *request, chunks=chunks)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**26


LONG = [
    ("/v1/completions", {"prompt": "a", "top_k": 2**63}),
    ("/v1/completions", {"prompt": "a", "priority": -(2.0**70)}),
    ("/v1/completions", {"prompt": "a", "repetition_detection": {"min_count": 1e25}}),
    ("/v1/chat/completions", {"messages": [], "min_tokens": str(2**70)}),
]


@pytest.mark.parametrize(("path", "asked"), LONG, ids=lambda one: str(one)[:60])
def test_integers_that_an_engine_cannot_take_are_refused(vllms_app, path, asked):
    answer = ask(vllms_app, "POST", path, [BEARER, JSON], chunks=[body_of(**asked)])
    assert answer.status == 400
    assert re.search("at most|at least|exceeded maximum size", error_of(answer))


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("body", "begin"),
    [
        (body_of(stop=["a", f"b{HALF}"], stream=True), "'stop' has half"),
        (body_of(vllm_xargs={"a": ["b", {"c": HALF}]}), "'vllm_xargs' has half"),
        (body_of(messages=[{"content": [{"type": "text", "text": HALF}]}]), "'messages' has half"),
        (body_of(**{HALF: 1}), "The body has half"),
        (json.dumps([HALF]).encode(), "The body has half"),
        (json.dumps(HALF).encode(), "The body has half"),
        (b'{"prompt": "\xed\xa0\xbd"}', "'prompt' has half"),  # as UTF-8 would write it
        (b'{"stop": ["a", "\\uDE00"]}', "'stop' has half"),
        (f'{{"prompt": "{HALF}"}}'.encode("utf-16", "surrogatepass"), "'prompt' has half"),
        (f'{{"prompt": "{HALF}"}}'.encode("utf-32", "surrogatepass"), "'prompt' has half"),
        (body_of(**{"x" * 5000: HALF}), "'xxx"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_its_field(body, begin):
    """No tokenizer and no engine reads it."""
    app = app_of()
    answer = ask(app, "POST", DATA[1], [BEARER, JSON], chunks=[body])
    assert answer.status == 400 and error_of(answer).startswith(begin)
    assert "half of a surrogate pair;" in error_of(answer)
    assert len(error_of(answer)) < 300 and not app.state.reached


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"logit_bias": {"5": NaN}}', "'logit_bias'"),
        ('{"prompt": "a", "temperature": Infinity}', "'temperature'"),
        ('{"length_penalty": -Infinity}', "'length_penalty'"),
        ('{"vllm_xargs": {"a": [1, 1e999]}}', "'vllm_xargs'"),
        ('{"min_p": -1E+0400}', "'min_p'"),
        ("[NaN]", "The body"),
        ('{"x": ' + "9" * 400 + ".0}", "'x'"),
    ],
    ids=lambda value: value[:40],
)
def test_numbers_that_are_none_are_refused_by_their_field(body, field):
    answer = ask(app_of(), "POST", "/v1/completions", [BEARER], chunks=[body.encode()])
    assert answer.status == 400
    assert error_of(answer) == (
        f"{field} has NaN or an infinite number, which JSON has not; send finite ones."
    )


@pytest.mark.parametrize("body", ['{"prompt": "NaN Infinity 1e999"}', '{"a": 1e300, "b": 1e-400}'])
def test_finite_numbers_are_not(body):
    answer = ask(app_of(), "POST", "/v1/completions", [BEARER], chunks=[body.encode()])
    assert answer.status == 200


def test_whole_surrogate_pairs_are_text():
    app = app_of()
    body = b'{"prompt": "\\ud83d\\ude00", "stop": ["\xf0\x9f\x98\x80"], "user": "\\\\ud83d"}'
    assert ask(app, "POST", DATA[1], [BEARER, JSON], chunks=[body]).status == 200
    assert limits.cut_field(json.loads(body)) is None and limits.cut_field(5) is None


def client_of(**config: Any) -> SimpleNamespace:
    """An engine's client, as much of it as refuses requests; ``given`` holds what it queues."""
    given: list[SimpleNamespace] = []
    processor = SimpleNamespace(assign_request_id=given.append)
    own = SimpleNamespace(**config)
    return SimpleNamespace(vllm_config=own, input_processor=processor, given=given)


def refused(client: SimpleNamespace, request: SimpleNamespace, said: str) -> None:
    """Ask an engine what it must refuse as a client's mistake, before it is queued."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=said) as caught:
        client.input_processor.assign_request_id(request)
    assert requests.is_refusal(caught.value) and not client.given


UNSENDABLE: dict[str, dict] = {
    "`priority` has an integer of more than 64 bits": {"priority": 2**64},
    "`priority` has an integer of more": {"priority": -(2**63) - 1},
    "`kv_transfer_params` has an integer": {"extra_args": {"a": [{"b": 2**64}, 1.5]}},
    "`kv_transfer_params` is nested too deep": {"extra_args": json.loads("[" * 900 + "]" * 900)},
}


def request_of(priority: int = 0, **sampling) -> SimpleNamespace:
    """As much of a request as is looked at before it is sent to an engine."""
    params = SimpleNamespace(**{"extra_args": None} | sampling)
    return SimpleNamespace(priority=priority, sampling_params=params)


@pytest.fixture
def usual_recursion() -> Iterator[None]:
    """Python's usual limit, which torch's compiler may have raised in this process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion")
@pytest.mark.parametrize("said", UNSENDABLE)
def test_what_an_engine_cannot_be_sent_is_refused(said):
    client = client_of()
    unsendable.refuse_unsendable(client)

    def send(frames: int) -> None:
        """From as deep as a route is."""
        if frames:
            send(frames - 1)
        else:
            refused(client, request_of(**UNSENDABLE[said]), said)

    send(frames=100)


@pytest.mark.parametrize(
    "asked",
    [
        *({}, {"priority": 2**64 - 1}, {"priority": -(2**63)}, {"extra_args": {"a": [2**64 - 1]}}),
        *({"extra_args": {"a": 1e300}}, {"extra_args": {"a": object}}),
    ],
    ids=str,
)
def test_what_an_engine_can_be_sent_is_not(asked):
    assert unsendable.problem(request_of(**asked)) is None
    assert unsendable.problem(SimpleNamespace(priority=0, sampling_params=None)) is None


@pytest.fixture
def completions_of_invocations(vllms_app):
    """What ``/invocations`` reads completions by; the other routes' is of an annotated type."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    routes = fail_fast.routes_in(vllms_app.routes)
    found = [adapter for route in routes for adapter in fail_fast.adapters(route)]
    (adapter,) = [adapter for adapter in found if adapter._type is CompletionRequest]
    return adapter


@pytest.mark.parametrize(
    "wrong",
    [
        *({"top_k": str(2**64)}, {"top_k": -1e25}, {"bad_words": [1] * 1000}),
        {"repetition_detection": {"max_pattern_size": 2, "min_count": str(2**64)}},
    ],
    ids=lambda one: str(one)[:40],
)
def test_invocations_reads_within_the_same_bounds(completions_of_invocations, wrong):
    read = completions_of_invocations.validate_python
    with pytest.raises(ValidationError) as caught:
        read({"prompt": "a", **wrong})
    assert caught.value.error_count() == 1
    assert read({"prompt": "a", "top_k": "7"}).top_k == 7


def test_an_integer_that_may_be_a_float_stays_one(vllms_app):
    (route,) = (route for route in vllms_app.routes if route.path == "/v1/completions")
    given = {"a": 2**63 + 1, "b": [2**64 - 1, -(2**63), 1.5]}
    found, errors = route.body_field.validate({"prompt": "a", "vllm_xargs": given}, {}, loc=())
    assert not errors and repr(found.vllm_xargs) == repr(given)


def test_bodies_that_cannot_be_bounded_are_told_of(vllms_app, warned):
    """Those of a route that reads its body by other means; the others have their bounds."""
    fail_fast.read_to_first_error(vllms_app)
    assert not warned
    app = FastAPI()

    async def invocations() -> None: ...

    async def taking_numbers(numbers: list[int]) -> int:
        return len(numbers)

    app.add_api_route(openai_app.INVOCATIONS, invocations, methods=["POST"])
    app.add_api_route("/other", taking_numbers, methods=["POST"])
    fail_fast.read_to_first_error(app)
    assert len(warned) == 1 and openai_app.INVOCATIONS in warned[0] and "/other" not in warned[0]
    assert ask(app, "POST", "/other", [JSON], chunks=[b"[%d]" % 2**64]).status == 422


ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    # vLLM adds what these lack before it reads them.
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "reasoning", "summary": []},
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "a"},
]


@pytest.mark.parametrize("wrong", [None, {}, 7], ids=str)
def test_what_is_right_is_read_as_before(vllms_app, wrong):
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    (route,) = (route for route in vllms_app.routes if route.path == "/v1/responses")
    items = 100 * ITEMS + ([] if wrong is None else [wrong])
    found, errors = route.body_field.validate({"input": items}, {}, loc=())
    if wrong is None:
        kinds = [type(item) for item in ResponsesRequest(input=items).input]
        assert not errors and [type(item) for item in found.input] == kinds
    else:
        assert errors


BEYOND = {  # one more than there is room for; the model stops at two tokens of its own
    "allowed_token_ids": {"allowed_token_ids": [*range(1025)]},
    "logit_bias": {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    "min_tokens": {"stop_token_ids": [*range(2, 129)], "min_tokens": 1},
    "bad_words": {"bad_words": ["a" * 512, "b" * 513]},
    "max_tokens": {"max_tokens": 2**30 + 1},
    "seed": {"seed": 2**63 - 2, "n": 3},
}
WITHIN: dict[str, dict] = {
    "allowed_token_ids": {"allowed_token_ids": [*range(1024)]},
    "logit_bias": {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    "stops": {"stop_token_ids": [*range(2, 128)], "min_tokens": 1},
    "no min_tokens": {"stop_token_ids": [*range(2, 1000)]},
    "bad_words": {"bad_words": ["a" * 512, "b" * 512]},
    "seed": {"seed": 2**63 - 2, "n": 2},
    "max_tokens": {"max_tokens": 2**30},
    "one answer": {"seed": 2**63 - 1},
    "usual": {},
}


class Letters:
    """A tokenizer of a token for each letter; none is put before a word."""

    max_token_id = 127

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*text.strip().encode()]


def processed(**asked) -> SimpleNamespace:
    """A request as vLLM's input processor leaves it."""
    from vllm import SamplingParams

    sampling = SamplingParams(**asked)
    sampling.update_from_generation_config({"eos_token_id": [0, 1]}, 0)
    sampling.update_from_tokenizer(Letters())
    return SimpleNamespace(sampling_params=sampling)


def engine(second_runner: bool) -> SimpleNamespace:
    client = client_of(use_v2_model_runner=second_runner)
    worker_limits.refuse_beyond_workers(client)
    return client


@pytest.mark.parametrize("name", BEYOND)
def test_what_ends_workers_is_refused(name):
    request = processed(**BEYOND[name])
    refused(engine(second_runner=True), request, name)
    client = engine(second_runner=False)
    client.input_processor.assign_request_id(request)
    assert client.given == [request]


@pytest.mark.parametrize("name", WITHIN)
def test_what_workers_have_room_for_is_not(name):
    request = processed(**WITHIN[name])
    client = engine(second_runner=True)
    client.input_processor.assign_request_id(request)
    client.input_processor.assign_request_id(pooling := SimpleNamespace(sampling_params=None))
    assert client.given == [request, pooling]


WITHOUT_ROW = {
    "Token 320 of the prompt": ([3, 320], {}),
    "Token -1 of the prompt": ([-1], {}),
    "Token 400 of `bad_words`": ([3], {"bad_words_token_ids": [[3], [5, 400]]}),
    "Token 999 of what ends an answer": ([3], {"min_tokens": 1, "all_stop_token_ids": {1, 999}}),
}


def asked_of_320(prompt, **sampling) -> tuple[SimpleNamespace, SimpleNamespace]:
    """An engine of 320 tokens, and a request as vLLM's input processor leaves it."""
    client = client_of(model_config=SimpleNamespace(get_vocab_size=lambda: 320))
    ids_without_row.refuse_ids_without_row(client)
    usual = {"min_tokens": 0, "all_stop_token_ids": {1}, "bad_words_token_ids": None}
    params = SimpleNamespace(**usual | sampling)
    return client, SimpleNamespace(prompt_token_ids=prompt, sampling_params=params)


@pytest.mark.parametrize("said", WITHOUT_ROW)
def test_ids_without_a_row_are_refused(said):
    prompt, sampling = WITHOUT_ROW[said]
    refused(*asked_of_320(prompt, **sampling), said)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([0, 319], {}), (None, {}), ([3], {"all_stop_token_ids": {999}})],
    ids=str,
)
def test_ids_with_a_row_are_not(prompt, sampling):
    client, request = asked_of_320(prompt, **sampling)
    client.input_processor.assign_request_id(request)
    assert client.given == [request]


def test_a_request_is_given_its_id_before_it_is_queued():
    """By the method that is replaced."""
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM

    _, _, source = inspect.getsource(sys.modules[AsyncLLM.__module__]).partition(" add_request(")
    assert "self.input_processor.assign_request_id(request)" in source
    assert source.index("assign_request_id") < source.index("_add_request(request")


def test_many_sequences_are_refused():
    app = app_of(max_sequences=4)
    for n, status in ((4, 200), (5, 400), (1e30, 400)):
        body = json.dumps({"prompt": "a", "n": n}).encode()
        answer = ask(app, "POST", "/invocations", [BEARER], chunks=[body])
        assert answer.status == status
    assert "at most 4" in error_of(answer)
    assert len(app.state.reached) == 1


# --- requests at a time


class Streams:
    """An app whose one route streams until it is told to end."""

    def __init__(self, limit: int) -> None:
        self.end = asyncio.Event()
        self.app = app_of(max_concurrent_requests=limit)
        self.cancelled = 0

        async def lines():
            try:
                yield b"first\n"
                await self.end.wait()
                yield b"last\n"
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        async def stream() -> StreamingResponse:
            return StreamingResponse(lines())

        async def broken() -> None:
            raise RuntimeError("a fault")

        self.app.add_api_route("/stream", stream, methods=["POST"])
        self.app.add_api_route("/broken", broken, methods=["POST"])

    def client(self, path: str = "/stream") -> Client:
        return Client("POST", path, [BEARER])

    async def status(self) -> int | None:
        """Of one more request, a short one."""
        return (await self.client(DATA[0]).ask(self.app)).status


def run(scenario) -> None:
    async def within_time() -> None:
        await asyncio.wait_for(scenario(), 30)

    asyncio.run(within_time())


def test_streams_count_until_their_end():
    async def scenario() -> None:
        streams = Streams(2)
        clients = [streams.client() for _ in range(2)]
        running = [asyncio.create_task(client.ask(streams.app)) for client in clients]
        for client in clients:
            await client.started.wait()
        refused = await streams.client().ask(streams.app)
        assert refused.status == 429 and int(refused.headers["retry-after"]) > 0
        assert "2 requests" in error_of(refused)
        # What starts nothing in the engine is answered meanwhile, and that asks the workers is not.
        assert (await Client("GET", DATA[0], [BEARER]).ask(streams.app)).status == 200
        assert (await Client("GET", "/v1/attn_res", [BEARER]).ask(streams.app)).status == 429
        for method in ("GET", "POST"):
            assert (await Client(method, "/ping").ask(streams.app)).status == 200
        streams.end.set()
        answers = await asyncio.gather(*running)
        assert [answer.body for answer in answers] == [b"first\nlast\n"] * 2
        assert await streams.status() == 200

    run(scenario)


@given(
    st.lists(st.sampled_from(["start", "leave", "cancel", "end", "fault", "large"]), max_size=20)
)
@settings(max_examples=60, deadline=None)
def test_places_are_counted_through_any_sequence_of_events(events):
    """No event leaks a place or frees one twice."""

    async def scenario() -> None:
        streams = Streams(3)
        held: list[tuple[Client, asyncio.Task]] = []
        for event in events:
            if event == "start":
                client = streams.client()
                task = asyncio.create_task(client.ask(streams.app))
                if len(held) < 3:
                    await client.started.wait()
                    held.append((client, task))
                else:
                    assert (await task).status == 429
            elif event == "leave" and held:
                client, task = held.pop()
                client.gone.set()
                await task
            elif event == "cancel" and held:
                _, task = held.pop()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif event == "end":
                streams.end.set()
                await asyncio.gather(*(task for _, task in held))
                held.clear()
                streams.end.clear()
            elif event == "fault" and len(held) < 3:
                with pytest.raises(RuntimeError):
                    await streams.client("/broken").ask(streams.app)
            elif event == "large":
                client = Client("POST", DATA[0], [BEARER, ("Content-Length", "9" * 12)])
                assert (await client.ask(streams.app)).status == (429 if len(held) == 3 else 413)
            assert await streams.status() == (429 if len(held) == 3 else 200)
        ended = streams.cancelled
        for client, task in held:
            client.gone.set()
            await task
        assert streams.cancelled == ended + len(held)

    run(scenario)


# --- flags, files and variables


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"first\r\n\n  second-~!  \n")
    assert read_keys(str(path)) == ["first", "second-~!"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "has no API key"),
        (b" \n\n", "has no API key"),
        (b"good\n# a comment\n", "line 2"),
        (b"two words\n", "line 1"),
        ("schlüssel\n".encode(), "line 1"),
        (b"good\n\x00\n", "line 2"),
    ],
    ids=str,
)
def test_a_file_without_keys_is_refused(tmp_path, capfd, monkeypatch, content, said):
    """In one sentence that shows no key, before anything starts."""
    monkeypatch.setattr(openai_server, "run_server", lambda *_: pytest.fail("it was served"))
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["serve", GOLDEN, "--api-key-file", str(path)]) == 2
    err = capfd.readouterr().err
    assert err.startswith("attnres-serve: ") and err.count("\n") == 1
    assert said in err and str(path) in err
    assert "good" not in err and "words" not in err


def test_garbage_is_collected_in_a_server(served, monkeypatch):
    """Which its imports do without."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    command = staticmethod(lambda _: served.append(gc.isenabled()))
    monkeypatch.setattr(ServeSubcommand, "cmd", command)
    gc.disable()
    try:
        assert cli.main(["serve", GOLDEN, "--port", "0"]) == 0
    finally:
        gc.enable()
    assert served == [True]


def test_flags_reach_the_server(served, tmp_path, capfd):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nanother\n")
    bounds = ["--max-body-bytes", "7", "--max-concurrent-requests", "8", "--max-sequences", "9"]
    bounds += ["--max-trace-tokens", "10", "--max-trace-weights", "11", "--drain-delay", "12"]
    bounds += ["--max-trace-bytes", "13"]
    flags = ["--port", "0", "--api-key-file", str(keys), "--public-metrics", *bounds]
    assert cli.main(["serve", GOLDEN, *flags]) == 0
    (args,) = served
    assert openai_server.api_keys(args) == [KEY, "another"]
    assert openai_server.policy_of(args) == Policy(True, 7, 8, 9, 10, 11, 13, 12)
    assert args.allowed_origins == []
    assert not args.trust_remote_code
    # To processes of their own they travel pickled; vLLM 0.28 logs the arguments as they are.
    copied = pickle.loads(pickle.dumps(args))
    assert openai_server.policy_of(copied) == Policy(True, 7, 8, 9, 10, 11, 13, 12)
    assert openai_server.api_keys(copied) == [KEY, "another"]
    assert KEY not in repr(copied) + str(vars(copied)) + capfd.readouterr().err


def test_without_flags(served, capfd):
    assert cli.main(["serve", GOLDEN, "--port", "0"]) == 0
    assert cli.main(["serve", GOLDEN, "--port", "0", "--allowed-origins", '["https://a"]']) == 0
    assert [args.allowed_origins for args in served] == [[], ["https://a"]]
    assert openai_server.api_keys(served[0]) == []
    assert openai_server.policy_of(served[0]) == Policy()
    assert served[0].h11_max_incomplete_event_size == 2**16
    assert "api-key" not in capfd.readouterr().err


@pytest.mark.parametrize("flag", [["--api-key", KEY], [f"--api-key={KEY}"], ["--api_key", KEY]])
def test_a_key_on_the_command_line_is_taken_with_a_warning(served, capfd, flag, monkeypatch):
    told: list[dict] = []
    monkeypatch.setattr(events, "tell", lambda _, **facts: told.append(facts))
    assert cli.main(["serve", GOLDEN, "--port", "0", *flag]) == 0
    assert openai_server.api_keys(served[0]) == [KEY]
    assert any("--api-key-file" in facts.get("text", "") for facts in told)
    assert KEY not in capfd.readouterr().err + str(told)


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--api-key", KEY], {}, "--api-key beside --api-key-file"),
        (["--grpc"], {}, "--grpc"),
        (["--api-key", ""], {}, "an empty --api-key"),
        ([], {"VLLM_SERVER_DEV_MODE": "1"}, "VLLM_SERVER_DEV_MODE"),
        ([], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
        ([], {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}, "VLLM_ENABLE_RESPONSES_API_STORE"),
    ],
    ids=str,
)
def test_what_would_open_the_server_is_refused(
    served, tmp_path, capfd, monkeypatch, flags, variables, said
):
    keys = tmp_path / "keys"
    keys.write_text("another")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = ["serve", GOLDEN, "--port", "0", "--api-key-file", str(keys), *flags]
    assert cli.main(words) == 2 and not served
    err = capfd.readouterr().err.splitlines()
    assert said in err[-1] and err[-1].startswith("attnres-serve: ")


def test_an_empty_key_ends_the_start_where_it_would_be_used(served, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", " ")
    assert cli.main(["serve", GOLDEN, "--port", "0"]) == 2 and not served
    assert "VLLM_API_KEY is set and empty" in capfd.readouterr().err
    (tmp_path / "keys").write_text(KEY)
    words = ["serve", GOLDEN, "--port", "0", "--api-key-file", str(tmp_path / "keys")]
    assert cli.main(words) == 0 and served


@pytest.mark.parametrize("points", [[], [EntryPoint("attnres", "no.such.module:x", "group")]])
def test_a_plugin_that_does_not_load_ends_the_start(served, capfd, monkeypatch, points):
    """vLLM would log that, and serve without keys and bounds."""
    monkeypatch.setattr(launcher, "entry_points", lambda **_: points)
    assert cli.main(["serve", GOLDEN, "--port", "0"]) == 2 and not served
    (said,) = capfd.readouterr().err.splitlines()
    assert "keys and bounds, cannot be loaded" in said


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--max-sequences", value) for value in ("0", "-1", "x", "1.5")),
        *(("--max-trace-weights", "0"), ("--drain-delay", "-1")),
    ],
)
def test_a_bound_is_a_positive_number(flag, value, capfd):
    assert cli.main(["serve", GOLDEN, flag, value]) == 2
    assert f"found {flag} {value}; expected a whole number of at" in capfd.readouterr().err


# --- vLLM's own app


@pytest.fixture(scope="module")
def vllms_app() -> FastAPI:
    """vLLM's app, complete with the plugin, no engine behind it."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # 0.28
        from vllm.entrypoints.openai.api_server import build_app

    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "attnres")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # the more routes the better
        args = parser.parse_args(["--model", "x", "--api-key", KEY])
        args.enable_scale_out = True
        return build_app(args, ("generate",))


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path, also of routers that were included as one."""
    found = []

    def walk(routes) -> None:
        for route in routes:
            if hasattr(route, "path"):
                for method in getattr(route, "methods", None) or ("GET",):
                    found.append((method, re.sub(r"\{[^}]*\}", "x", route.path)))
            walk(getattr(getattr(route, "router", None), "routes", ()))

    walk(app.routes)
    return found


def test_every_route_of_vllm_asks_for_the_key(vllms_app):
    """In OpenAI's shape, whether or not its own key covers them."""
    routes = routes_of(vllms_app)
    named = {path for _, path in routes}
    assert {"/invocations", "/tokenize", "/v1/attn_res/trace", "/collective_rpc"} <= named
    for method, path in routes:
        if path not in (*PROBES, ROOT, PAGE) and not path.startswith(f"{PAGE}/"):
            for written in (path, f"{path}/", f"/{path}"):
                answer = ask(vllms_app, method, written, [("Authorization", f"Basic {KEY}")])
                assert answer.status == 401, (method, written)
                assert "`Authorization: Bearer KEY`" in error_of(answer)


def test_a_route_for_a_feature_that_is_off_is_closed(vllms_app):
    """With its flag it is vLLM's."""
    answer = ask(vllms_app, "POST", "/scale_elastic_ep", [BEARER, JSON], chunks=[b"[]"])
    assert answer.status == 404 and "--enable-elastic-ep" in error_of(answer)
    assert openai_app.closed_routes(SimpleNamespace(enable_elastic_ep=True)) == {}


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


# --- fields that no route reads, and those of another shape


@pytest.fixture
def told(warned, monkeypatch) -> list[str]:
    """What is warned of, in a process that has told nothing yet."""
    monkeypatch.setattr(reading, "_logged", set())
    return warned


ASKED = {"role": "user", "content": "a"}
BODIES = {
    "/v1/completions": {"model": "x", "prompt": "a"},
    "/v1/chat/completions": {"model": "x", "messages": [ASKED]},
    "/v1/chat/completions/batch": {"model": "x", "messages": [[ASKED]]},
    "/v1/responses": {"model": "x", "input": "a"},
}


def read(app: FastAPI, path: str, body: dict):
    """The model that a route makes of a body."""
    (route,) = (route for route in app.routes if route.path == path)
    found, errors = route.body_field.validate(body, {}, loc=())
    assert not errors
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "unknown",
    [
        *({"max_token": 3}, {"guided_json": {"type": "object"}}, {"extra_body": {"top_k": 1}}),
        *({"prompt_cache_options": {"a": 1}, "best_off": 3}, {"frobnicate": [], "store_": False}),
    ],
    ids=str,
)
def test_a_field_that_no_route_reads_is_told_of_once(vllms_app, told, path, unknown):
    """And the rest of the body is read as without it."""
    for _ in range(3):
        found = read(vllms_app, path, BODIES[path] | unknown)
    expected = read(vllms_app, path, BODIES[path])
    dropped = {"request_id", *unknown}
    assert found.model_dump(exclude=dropped) == expected.model_dump(exclude=dropped)
    assert [name for line in told for name in unknown if f"{name!r}" in line] == [*unknown]
    assert len(told) == len(unknown)


def test_no_field_is_told_of_that_is_read_or_null(vllms_app, told):
    read(vllms_app, "/v1/completions", BODIES["/v1/completions"] | {"n": 2, "nothing": None})
    assert not told


def test_a_client_cannot_fill_the_log(vllms_app, told):
    for first in range(0, 1000, 10):
        names = {f"{number}-{'x' * 5000}": 1 for number in range(first, first + 10)}
        read(vllms_app, "/v1/completions", BODIES["/v1/completions"] | names)
    assert len(told) == reading.MOST and max(map(len, told)) < 300


def test_invocations_tells_of_fields_too(completions_of_invocations, told):
    completions_of_invocations.validate_python({"prompt": "a", "max_token": 1})
    assert len(told) == 1 and "'max_token'" in told[0]


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


@pytest.mark.parametrize(
    ("coding", "body", "says"),
    [
        ("gzip", gzip.compress(b"{}", mtime=0), "compressed (gzip)"),
        (None, gzip.compress(b"{}", mtime=0), "compressed (gzip)"),
        ("br", b"\x8b\x01\x80{}\xff", "compressed (br)"),
        (None, b'"\xff"', "is not in UTF-8"),
        (None, b"[" * 100_000, "is nested too deep"),
        (None, b'{"n": ' + b"9" * 5000 + b"}", "has too long a number"),
    ],
)
def test_why_a_body_cannot_be_read(coding, body, says):
    """The routes would say so in another shape."""
    headers = [BEARER, JSON, *([("Content-Encoding", coding)] if coding else [])]
    app = app_of()
    answer = ask(app, "POST", DATA[0], headers, chunks=[body])
    assert answer.status == 400 and says in error_of(answer) and error_of(answer).endswith(".")
    assert not app.state.reached
    # What is not declared as JSON is the routes' affair, unless it is too deep for any reader.
    undeclared = ask(app, "POST", DATA[0], [BEARER], chunks=[body]).status
    assert undeclared == (400 if body.startswith(b"[") else 200)


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
    ("/v1/responses", {"input": 5}, "input: found 5; expected text or a list."),
    ("/v1/responses", {"input": [{}]}, "input[0]."),
    ("/tokenize", {}, "prompt is missing; give it."),
]


@pytest.mark.parametrize(("path", "asked", "says"), MISREAD, ids=lambda one: str(one)[:50])
def test_a_body_that_vllm_cannot_read_is_refused_in_one_sentence(vllms_app, path, asked, says):
    body = json.dumps(asked).encode()
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


def test_a_body_that_is_no_json_is_refused_in_one_sentence(vllms_app):
    for body, says in (
        (b"{", "The body is not valid JSON (Expecting property name"),
        (b"", "The body has to be"),
    ):
        answer = ask(vllms_app, "POST", "/v1/completions", [BEARER, JSON], chunks=[body])
        assert answer.status == 400 and error_of(answer).startswith(says)
        assert "\n" not in error_of(answer)


@pytest.mark.parametrize("flag", ["--enable-weight-updates", "--enable-attnres-edits"])
def test_what_needs_a_key_ends_the_start_without(served, tmp_path, capfd, monkeypatch, flag):
    """Any page that a browser shows could pause the server, or change what it computes."""
    words = ["serve", GOLDEN, "--port", "0", flag]
    assert cli.main(words) == 2 and not served
    assert "there is no API key" in capfd.readouterr().err.splitlines()[-1]
    keys = tmp_path / "keys"
    keys.write_text("one")
    monkeypatch.setattr(openai_server, "weight_transfer", lambda words: {})
    for more in (["--api-key", "one"], ["--api-key-file", str(keys)], []):
        monkeypatch.setenv("VLLM_API_KEY", "" if more else "one")
        if more:
            monkeypatch.delenv("VLLM_API_KEY")
        assert cli.main([*words, *more]) == 0
    assert len(served) == 3
