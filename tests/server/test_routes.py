"""Our routes, as docs/use/serve.md lists them."""

import re
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import RedirectResponse, StreamingResponse
from serving import ROOT
from starlette.testclient import TestClient

pytest.importorskip("vllm")

from attnres_serve.server import endpoints, lifecycle
from attnres_serve.server.head_requests import HeadRequests
from attnres_serve.server.routes import edits, info, models, page, statistics, trace

PARAMETER = re.compile(r"\{.*?\}")
ROUTES = (edits, info, models, page, statistics, trace)


def test_the_page_lists_every_route() -> None:
    text = (ROOT / "docs" / "use" / "serve.md").read_text()
    rows = re.findall(r"^\| (`[A-Z]+ /.*?`) \|", text, re.M)
    listed = {PARAMETER.sub("{}", one) for row in rows for one in re.findall("`(.*?)`", row)}
    ours = {
        f"{method} {PARAMETER.sub('{}', route.path)}"
        for module in (lifecycle, *ROUTES)
        for route in module.router.routes
        for method in route.methods
    }
    assert ours - listed == {"GET /attn_res/{}"}  # files of the page
    assert listed <= ours


def test_every_file_of_routes_is_looked_at() -> None:
    files = {path.stem for path in (ROOT / "server" / "routes").glob("*.py")}
    listed = {module.__name__.rpartition(".")[2] for module in ROUTES}
    assert files == {"__init__", "weights", *listed}  # those of weights are vLLM's


@pytest.mark.parametrize("path", ["/plain", "/away", "/parts", "/missing", "/only-post"])
def test_head_is_get_without_a_body(path: str) -> None:
    app = FastAPI()
    app.add_middleware(HeadRequests)
    app.get("/plain")(lambda: {"a": 1})
    app.get("/away")(lambda: RedirectResponse("plain"))
    app.get("/parts")(lambda: StreamingResponse(iter([b"a", b"b"])))
    app.post("/only-post")(lambda: None)
    client = TestClient(app, follow_redirects=False)
    get, head = client.get(path), client.head(path)
    assert head.status_code == get.status_code
    assert head.headers == get.headers
    assert head.content == b"" and (get.content or path == "/away")


def test_head_is_answered_on_the_routes_of_a_server() -> None:
    """Behind the guard, so that it needs a key where GET does."""
    app = FastAPI()
    app.state.args = SimpleNamespace(api_key=["k"], host="127.0.0.1", uds=None)
    app.get("/v1/models")(lambda: [])
    app.get("/health")(lambda: None)
    endpoints.protect(app)
    client = TestClient(app, client=("127.0.0.1", 5))
    assert client.head("/health").status_code == 200
    assert client.head("/v1/models").status_code == client.get("/v1/models").status_code == 401
    keyed = {"Authorization": "Bearer k"}
    assert client.head("/v1/models", headers=keyed).status_code == 200
