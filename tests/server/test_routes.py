"""Our routes, as docs/use/serve.md lists them."""

import re

import pytest
from serving import ROOT

pytest.importorskip("vllm")

from attnres_serve.server import lifecycle
from attnres_serve.server.routes import info, models, page, trace

PARAMETER = re.compile(r"\{.*?\}")


def test_the_page_lists_every_route() -> None:
    text = (ROOT / "docs" / "use" / "serve.md").read_text()
    listed = {PARAMETER.sub("{}", row) for row in re.findall(r"^\| `([A-Z]+ /.*?)` \|", text, re.M)}
    ours = {
        f"{method} {PARAMETER.sub('{}', route.path)}"
        for router in (info.router, lifecycle.router, models.router, page.router, trace.router)
        for route in router.routes
        for method in route.methods
    }
    assert ours - listed == {"GET /attn_res/{}"}  # files of the page
    assert listed <= ours


def test_every_file_of_routes_is_looked_at() -> None:
    files = {path.stem for path in (ROOT / "server" / "routes").glob("*.py")}
    assert files == {"__init__", "info", "models", "page", "replays", "trace"}
