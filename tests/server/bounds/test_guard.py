"""Keys, hostile paths and hosts."""

import re
from types import SimpleNamespace

import pytest
from asgi import ask
from fastapi import FastAPI
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

pytest.importorskip("vllm")

from bounded_app import BEARER, DATA, JSON, KEY, PUBLIC, app_of, error_of

from attnres_serve.compat import openai_app
from attnres_serve.server.bounds import guard
from attnres_serve.server.bounds.guard import PAGE, PROBES, ROOT, is_local


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


@pytest.mark.parametrize("path", [*DATA, "/attn_res", "/attn_res/page.js", "/metrics"])
def test_no_body_is_read_without_the_key(path):
    answer = ask(app_of(public_metrics=True), "POST", path)
    assert (answer.status, answer.taken) == (401, 0)


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
