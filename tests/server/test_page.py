"""The page ``/attn_res`` and the HTML file of a trace: as files, and in a real browser."""

import base64
import hashlib
import io
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from fastapi import FastAPI
from matplotlib.image import imread
from serving import Server, running_demo
from starlette.testclient import TestClient

from attnres_serve.inspect import page as inspect_page
from attnres_serve.server.routes import page

KEY = "a-key-of-the-test"
PROMPT = "import os\n\n\ndef "
HOSTILE = ["</script><script>hacked = 1</script>", "<img src=x onerror=hacked=1>", "<!--", "\u202e"]
PICTURES = ("weights", "mean-weights", "magnitude", "entropy")


def made_up_trace(layers: int, block: int, texts: list[str | None]) -> dict:
    """A trace of a model with that many layers and sublayers per block."""
    draw = random.Random(0).random
    sites = []
    for index in range(2 * layers + 1):
        finished = [f"block {number}" for number in range(1, index // block + 1)]
        sources = ["embedding", *finished, *(["partial"] if index % block else [])]
        weights = []
        for _ in texts:
            row = [math.exp(5 * draw()) for _ in sources]
            weights.append([size / sum(row) for size in row])
        final = index == 2 * layers
        sites.append(
            {
                "index": index,
                "layer": None if final else index // 2,
                "kind": "final" if final else ("attention", "mlp")[index % 2],
                "sources": sources,
                "weights": weights,
                "rms": [[0.5 + draw() + 0.1 * at for at in range(len(sources))] for _ in texts],
                "entropy": [-sum(w * math.log(w) for w in row) for row in weights],
            }
        )
    tokens = [{"position": at, "id": at + 3, "text": text} for at, text in enumerate(texts)]
    count = len(texts)
    return {
        "model": "made up",
        "prompt_tokens": count // 2,
        "total_tokens": count,
        "tokens": tokens,
        "sites": sites,
    }


# Files.


@pytest.fixture(scope="module")
def app() -> TestClient:
    app = FastAPI()
    app.include_router(page.router)
    return TestClient(app, follow_redirects=False)


@pytest.mark.parametrize("name", [None, *page.FILES])
def test_files(app, name):
    answer = app.get("/attn_res" if name is None else f"/attn_res/{name}")
    assert answer.status_code == 200
    assert answer.content == (page.FOLDER / (name or page.INDEX)).read_bytes()
    kind = page.FILES[name or page.INDEX]
    assert answer.headers["content-type"].partition(";")[0] == kind
    if kind.startswith("text/"):
        assert answer.headers["content-type"].endswith("; charset=utf-8")
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_every_file_is_served_and_every_reference_is_a_file():
    held = {str(path.relative_to(page.FOLDER)) for path in page.FOLDER.rglob("*") if path.is_file()}
    assert held == {*page.FILES, "vendor/README.md"}
    index = (page.FOLDER / page.INDEX).read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', index)
    assert {name.removeprefix("attn_res/") for name in named} < set(page.FILES)
    assert all(name.startswith("attn_res/") for name in named)  # of this server
    assert not re.search(r'\sstyle="|\son\w+="|<style|javascript:', index)


def test_a_slash_at_the_end(app):
    """It leads to the page, whose addresses are relative, and names no host."""
    answer = app.get("/attn_res/", headers={"host": "other.example"})
    assert (answer.status_code, answer.headers["location"]) == (307, "../attn_res")


@pytest.mark.parametrize(
    "path",
    [
        "..%2fpage.py",
        "%2e%2e/%2e%2e/trace.py",
        "vendor%2f..%2f..%2fpage.py",
        "vendor%2f..%2fpage.css",
        "%2fetc%2fpasswd",
        "..%5cpage.py",
        "page.css%00",
        "page.css/",
        "PAGE.CSS",
        "vendor",
        "vendor/",
        "vendor/README.md",
        "page",
    ],
)
def test_no_other_path_is_a_file(app, path):
    answer = app.get(f"/attn_res/{path}")
    assert answer.status_code == 404
    assert "root" not in answer.text and "import" not in answer.text


def test_the_libraries_are_those_that_are_named():
    """Name, version and hash in the README, a licence beside each."""
    rows = re.findall(
        r"^\| `(\S+)` \| `(\S+)`, .*? \| (\S+) \| .*?`(\S+)` \| `(\w{64})` \|$",
        (page.FOLDER / "vendor" / "README.md").read_text(),
        re.M,
    )
    assert len(rows) == len(list((page.FOLDER / "vendor").glob("*.js"))) == 2
    for name, _, version, licence, digest in rows:
        code = (page.FOLDER / "vendor" / name).read_bytes()
        assert hashlib.sha256(code).hexdigest() == digest
        assert f"v{version} Copyright" in code.splitlines()[0].decode()
        assert "Permission to use" in (page.FOLDER / "vendor" / licence).read_text()


# The HTML file of a trace.


class Elements(HTMLParser):
    """Attributes and text of every element, and what would load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.styles: list[str] = []
        self.loads: list[str] = []
        self.policy = ""
        self._open: tuple[str, dict] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self._open = (tag, found)
        self.loads += [found[name] for name in ("src", "href", "srcset", "action") if name in found]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open and self._open[0] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._open and self._open[0] == "style":
            self.styles.append(data)


def test_a_trace_as_one_file():
    """Nothing is loaded; nothing but the page's own scripts may run; the trace is in it, intact."""
    trace = made_up_trace(2, 2, HOSTILE)
    found = Elements(inspect_page.html(trace))
    assert found.loads == []
    ((_, data),) = (one for one in found.scripts if one[0].get("id") == "trace")
    assert json.loads(data) == trace
    code = [text for attributes, text in found.scripts if not attributes]
    assert len(code) == len(found.scripts) - 1 == 4
    policy = dict(part.split(" ", 1) for part in found.policy.split("; "))
    assert policy["default-src"] == "'none'"
    for source, texts in (("script-src", code), ("style-src", found.styles)):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts]
        assert policy[source].split() == [f"'sha256-{digest.decode()}'" for digest in digests]
    assert not re.search(r"@import|url\(", "".join(found.styles))
    assert "Permission to use" in code[0] and "Permission to use" in code[1]


# In a browser.


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no `chromium` on PATH; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium)
        yield launched
        launched.close()


@dataclass
class Visit:
    """A tab, and what went on in it."""

    tab: object
    errors: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tab.set_default_timeout(60_000)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", self._console)
        self.tab.on("request", lambda request: self.asked.add(request.url))

    def _console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def text(self, selector: str) -> str:
        return self.tab.locator(selector).text_content()

    def wait(self, selector: str, text: str) -> None:
        self.tab.locator(selector).get_by_text(text).wait_for()

    def trace(self, prompt: str = PROMPT, tokens: int = 12) -> None:
        self.tab.fill("#prompt", prompt)
        self.tab.fill("#max-tokens", str(tokens))
        self.tab.click("#run")
        self.drawn()

    def drawn(self) -> None:
        for name in PICTURES:
            self.tab.locator(f"#{name} svg").wait_for()

    def cells(self, picture: str = "weights") -> int:
        return (
            self.tab.locator(f'#{picture} svg > g[aria-label="cell"]').first.locator("rect").count()
        )

    def chosen(self) -> int:
        (index,) = self.tab.eval_on_selector_all(
            "#tokens [aria-selected=true]", "found => found.map(one => Number(one.dataset.index))"
        )
        return index

    def download(self, selector: str) -> tuple[str, str]:
        with self.tab.expect_download() as waiting:
            self.tab.click(selector)
        return waiting.value.suggested_filename, Path(waiting.value.path()).read_text()

    def brightness(self, path: Path | None = None) -> float:
        """Of the whole page, 0 to 1, as a picture shows it."""
        return float(
            imread(io.BytesIO(self.tab.screenshot(full_page=True, path=path)))[..., :3].mean()
        )

    def overflows(self) -> bool:
        root = "document.documentElement"
        return self.tab.evaluate(f"{root}.scrollWidth > {root}.clientWidth")


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def make(**options) -> Visit:
        contexts.append(browser.new_context(**{"color_scheme": "light"} | options))
        return Visit(contexts[-1].new_page())

    yield make
    for context in contexts:
        context.close()


def test_the_file_in_a_browser(visit, tmp_path):
    """Hostile texts are texts; deep models fit, also on a phone; an absent source is empty."""
    texts = [*HOSTILE, " def", "\n\n", "\t", None, "", "é", "\x00"] * 3
    for layers, block, width in ((2, 2, 1280), (28, 7, 390), (48, 1, 390)):
        trace = made_up_trace(layers, block, texts)
        file = tmp_path / f"{layers}.html"
        file.write_text(inspect_page.html(trace))
        found = visit(viewport={"width": width, "height": 800})
        found.tab.goto(file.as_uri())
        found.drawn()
        assert found.cells() == sum(len(site["sources"]) for site in trace["sites"])
        assert not found.overflows()
        shown = found.tab.locator("#tokens [role=option]").all_text_contents()
        assert shown[:2] == [text.replace(" ", "·") for text in HOSTILE[:2]]
        assert shown[2:11] == ["<!--", "U+202E", "·def", "↵↵", "⇥", "#10", "#11", "é", "U+0000"]
        assert found.tab.evaluate("typeof hacked") == "undefined"
        assert found.text("#model") == "made up"
        assert found.errors == []
        assert found.asked == {file.as_uri()}
        assert found.tab.locator("form").count() == 0


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("page") / "log"
    with running_demo(log, "--api-key", KEY) as running_server:
        running_server.client.headers["authorization"] = f"Bearer {KEY}"
        yield running_server


@pytest.fixture
def opened(visit, server) -> Visit:
    """The page, opened on a server that asks for no key, as far as the page can see."""
    found = visit(extra_http_headers={"authorization": f"Bearer {KEY}"}, accept_downloads=True)
    found.tab.goto(f"{server.url}/attn_res")
    found.wait("#model", "17 sites")
    return found


@pytest.mark.engine
def test_a_completion_and_its_trace(opened, server, tmp_path):
    """Streamed, traced as shown, chosen by click and keys, pointed at, saved, light and dark."""
    tab = opened.tab
    tab.evaluate(
        "growing = new Set(); new MutationObserver(() => growing.add("
        "document.querySelector('#stream .answer')?.textContent)).observe("
        "document.getElementById('stream'), {childList: true, subtree: true})"
    )
    opened.trace()
    assert tab.evaluate("growing.size") > 4  # not all at once
    assert "17 sites" in opened.text("#status") and opened.text("#error") == ""
    assert not tab.locator("#key-field").is_visible()

    name, text = opened.download("#json")
    trace = json.loads(text)
    answer = server.complete(PROMPT, max_tokens=12)
    given = answer["usage"]["prompt_tokens"]
    assert name == "attn-res-trace.json"
    assert (
        "".join(token["text"] for token in trace["tokens"][given:]) == answer["choices"][0]["text"]
    )
    assert tab.locator("#tokens .prompt").count() == given
    assert tab.locator("#tokens .answer").count() == len(trace["tokens"]) - given == 12
    assert opened.cells() == opened.cells("mean-weights")
    assert opened.cells() == sum(len(site["sources"]) for site in trace["sites"])

    last = len(trace["tokens"]) - 1
    assert opened.chosen() == last
    before = tab.locator("#weights svg").inner_html()
    tab.locator("#tokens [role=option]").nth(3).click()
    assert opened.chosen() == 3
    tab.locator('#weights svg[aria-label*="token 3,"]').wait_for()
    assert tab.locator("#weights svg").inner_html() != before
    for key, index in (("Right", 4), ("Left", 3), ("Home", 0), ("Left", 0), ("End", last)):
        tab.keyboard.press(key if key in ("Home", "End") else f"Arrow{key}")
        assert opened.chosen() == index
        assert tab.evaluate("Number(document.activeElement.dataset.index)") == index
    tab.keyboard.press("ArrowUp")
    assert 0 < opened.chosen() < last
    tab.keyboard.press("ArrowDown")
    tab.locator(f'#entropy svg[aria-label*="token {opened.chosen()},"]').wait_for()

    tab.locator('#weights svg > g[aria-label="cell"] rect').nth(1).hover()
    assert "MLP of layer 0" in tab.locator('#weights [aria-label="tip"] text').text_content()
    for picture in PICTURES:
        name, text = opened.download(f"#{picture} button")
        assert name.startswith(f"attn-res-{picture}") and name.endswith(".svg")
        drawn = ElementTree.fromstring(text)
        assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text and "tip" not in text
        assert tab.locator(f"#{picture} svg").get_attribute("aria-label") in "".join(
            drawn.itertext()
        )

    assert opened.brightness(tmp_path / "light.png") > 0.8
    tab.click("#theme")
    assert tab.locator("#theme").get_attribute("aria-pressed") == "true"
    tab.locator('#entropy svg[color="#e4e9f0"]').wait_for()
    assert opened.brightness(tmp_path / "dark.png") < 0.25
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.locator('#weights svg[width^="3"]').wait_for()  # drawn again, 300 to 399 wide
    assert not opened.overflows()

    assert opened.errors == []
    assert {urlsplit(url).netloc for url in opened.asked if not url.startswith("blob:")} == {
        urlsplit(server.url).netloc
    }


@pytest.mark.engine
def test_only_the_last_tokens(opened):
    """And with the keyboard alone, on a system with a dark theme."""
    opened.tab.emulate_media(color_scheme="dark")
    opened.tab.fill("#last", "5")
    opened.tab.fill("#max-tokens", "3")
    opened.tab.focus("#prompt")
    opened.tab.keyboard.press("Control+Enter")
    opened.drawn()
    assert opened.tab.locator("#tokens .answer").count() == 3
    assert opened.tab.locator("#tokens .prompt").count() == 2
    assert opened.tab.locator("#theme").get_attribute("aria-pressed") == "true"
    assert opened.brightness() < 0.25
    focused = "document.activeElement"
    reached = {}
    opened.tab.focus("#prompt")
    for _ in range(12):
        opened.tab.keyboard.press("Tab")
        name, seen = opened.tab.evaluate(
            f"[{focused}.id || {focused}.role, {focused}.matches(':focus-visible')]"
        )
        reached[name] = seen
    for name in ("max-tokens", "last", "run", "json", "option"):
        assert reached[name], name
    assert opened.errors == []


@pytest.mark.engine
def test_the_key(visit, server):
    """The shell is public, the data is not; the field is there once the server asked for a key."""
    found = visit()
    assert found.tab.goto(f"{server.url}/attn_res").status == 200
    found.tab.locator("#key-field").wait_for()
    found.wait("#error", "Unauthorized: the server asks for an API key.")
    found.tab.fill("#key", "another")
    found.tab.click("#run")
    found.wait("#error", "Unauthorized: this is not the server's API key.")
    assert found.tab.locator("#viewer").is_hidden()
    found.tab.fill("#key", "schlüssel")
    found.tab.click("#run")
    found.wait("#error", "An API key has printable ASCII characters only.")
    found.tab.fill("#key", KEY)
    found.trace(tokens=2)
    assert found.text("#error") == ""
    found.wait("#model", "17 sites")
    assert (
        found.tab.evaluate("localStorage.length + sessionStorage.length + document.cookie.length")
        == 0
    )
    assert all(KEY not in url for url in found.asked)
    assert all("401" in error for error in found.errors)  # the browser's own lines


@pytest.mark.engine
def test_refusals_are_shown_as_the_server_says_them(opened, server):
    body = {"prompt": PROMPT, "max_tokens": 5000}
    said = server.client.post("/v1/completions", json=body).json()["error"]["message"]
    opened.tab.fill("#prompt", PROMPT)
    opened.tab.fill("#max-tokens", "5000")
    opened.tab.click("#run")
    opened.tab.locator("#error:not(:empty)").wait_for()
    assert opened.text("#error") == said
    assert opened.tab.locator("#run").is_enabled()

    said = "This server was started with --disable-trace."
    opened.tab.route(
        "**/v1/attn_res/trace",
        lambda route: route.fulfill(status=403, json={"error": {"message": said}}),
    )
    opened.tab.fill("#max-tokens", "3")
    opened.tab.click("#run")
    opened.wait("#error", said)
    assert opened.text("#stream").startswith(PROMPT)  # the answer stays
    assert opened.text("#status") == ""

    opened.tab.route("**/v1/completions", lambda route: route.abort())
    opened.tab.click("#run")
    opened.wait("#error", "The server does not answer; is it still running?")


@pytest.mark.engine
def test_cancel(opened, server):
    """It ends the request, and the next one is answered."""
    opened.tab.fill("#max-tokens", "900")
    opened.tab.click("#run")
    opened.tab.locator("#stream .answer").get_by_text(re.compile(r"\S")).wait_for()
    opened.tab.click("#cancel")
    opened.wait("#status", "Cancelled.")
    assert opened.tab.locator("#viewer").is_hidden()
    assert not opened.tab.locator("#cancel").is_enabled()
    opened.trace(tokens=2)
    assert opened.text("#error") == ""
    assert opened.errors == []
