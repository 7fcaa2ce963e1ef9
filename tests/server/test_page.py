"""The page ``/attn_res`` and the HTML file of a trace: as files, and in a real browser."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
from demo_servers import KEY
from fastapi import FastAPI
from faults import until
from made_up import SITE, MadeUpServer, made_up_trace
from matplotlib import colormaps
from matplotlib.colors import PowerNorm
from serving import ROOT, Server
from starlette.testclient import TestClient

from attnres_serve.lens import figure
from attnres_serve.lens import page as inspect_page
from attnres_serve.server.routes import page
from attnres_serve.tracing.answer import TraceAnswer

PAPER = "https://arxiv.org/abs/2603.15031"
PROMPT = "import os\n\n\ndef "
HOSTILE = ["</script><script>hacked = 1</script>", "<img src=x onerror=hacked=1>", "<!--", "\u202e"]
PICTURES = ("weights", "second", "magnitude", "entropy")
SVG = "{http://www.w3.org/2000/svg}"
CUT_OFF = """() => {
  const { right, bottom } = document.documentElement.getBoundingClientRect();
  const isCut = (box) => box.left < 0 || box.top < 0 || box.right > right || box.bottom > bottom;
  const texts = [...document.querySelectorAll("text")];
  return texts.filter((one) => isCut(one.getBoundingClientRect())).map((one) => one.textContent);
}"""


def is_coloured(colours: list[str], weights: list[float], root: int = 2) -> bool:
    """To 3 of 255: the page goes straight between 33 of matplotlib's 256 colours, and rounds."""
    numbers = [[int(part) for part in re.findall(r"\d+", colour)] for colour in colours]
    norm = PowerNorm(1 / root, vmin=0, vmax=1)
    expected = colormaps["viridis"](norm(weights))[:, :3] * 255
    return bool(np.abs(np.array(numbers) - expected).max() <= 3)


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
    assert held == set(page.FILES)
    index = (page.FOLDER / page.INDEX).read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', index)
    named.remove(PAPER)
    assert {name.removeprefix("attn_res/") for name in named} < set(page.FILES)
    assert all(name.startswith("attn_res/") for name in named)  # of this server
    assert not re.search(r'\sstyle="|\son\w+="|<style|javascript:', index)


@pytest.mark.parametrize("name", ["tutorial", "page"])
def test_the_page_leads_to_copies_of_the_documentation(name):
    """They are copies, because a wheel has no docs/: ``cp docs/use/NAME.md`` there."""
    copy = page.FOLDER / f"{name}.txt"
    assert copy.read_bytes() == (ROOT / "docs" / "use" / f"{name}.md").read_bytes()
    below_the_title = page_text().partition('<p id="why">')[2].partition("</p>")[0]
    assert f'href="attn_res/{copy.name}"' in below_the_title and PAPER in below_the_title


def test_the_example_is_a_small_trace_of_the_demo():
    """Prompt, ids of a greedy answer of 12 tokens, ``logprobs`` 5 and ``lens`` 1, four digits."""
    path = page.FOLDER / "example.json"
    assert path.stat().st_size < 100_000
    trace = TraceAnswer.model_validate_json(path.read_text())
    (prompt,) = re.findall(r'<textarea id="prompt"[^>]*>([^<]*)<', page_text())
    texts = "".join(token.text or "" for token in trace.tokens[1 : trace.prompt_tokens])
    assert texts == prompt
    assert len(trace.sites) == 17 and trace.model == "demo"
    assert trace.logprobs is not None and trace.lens is not None


def page_text() -> str:
    return (page.FOLDER / page.INDEX).read_text()


def test_a_slash_at_the_end(app):
    """It leads to the page, whose addresses are relative, and names no host."""
    answer = app.get("/attn_res/", headers={"host": "other.example"})
    assert (answer.status_code, answer.headers["location"]) == (307, "../attn_res")


@pytest.mark.parametrize(
    "path",
    [
        "..%2fpage.py",
        "%2e%2e/%2e%2e/trace.py",
        "static%2f..%2fpage.css",
        "%2fetc%2fpasswd",
        "page.css%00",
        "PAGE.CSS",
    ],
)
def test_no_other_path_is_a_file(app, path):
    answer = app.get(f"/attn_res/{path}")
    assert answer.status_code == 404
    assert "root" not in answer.text and "import" not in answer.text


@pytest.mark.parametrize("path", sorted(page.FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_modules_import_what_others_export(path):
    """In the one form that the HTML file can join, and no library."""
    code = path.read_text()
    imports = inspect_page.IMPORT.findall(code)
    assert len(imports) == len(
        re.findall(r"\bimport\b(?! by)", re.sub(r"//.*|/\*.*?\*/", "", code))
    )
    for names, other in imports:
        exported = inspect_page.EXPORT.findall((page.FOLDER / other).read_text())
        assert set(re.findall(r"\w+", names)) <= set(exported), other
    assert len(inspect_page.EXPORT.findall(code)) == len(re.findall(r"^export\b", code, re.M))


# In a browser.


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no `chromium` on PATH; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A process for drawing costs more than it draws.
        launched = playwright.chromium.launch(executable_path=chromium, args=["--in-process-gpu"])
        yield launched
        launched.close()


@dataclass
class Visit:
    """A tab, and what went on in it."""

    tab: object
    errors: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    posted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tab.set_default_timeout(120_000)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", self._console)
        self.tab.on("request", self._request)

    def _console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _request(self, request) -> None:
        self.asked.add(request.url)
        if request.method == "POST":
            self.posted.append(urlsplit(request.url).path)

    def text(self, selector: str) -> str:
        return self.tab.locator(selector).text_content()

    def wait(self, selector: str, text: str) -> None:
        self.tab.locator(selector).get_by_text(text).wait_for()

    def ask(self, prompt: str = PROMPT, tokens: int = 12, last: str = "") -> None:
        if not self.tab.locator("#max-tokens").is_visible():
            self.tab.click("#options summary")
        self.tab.fill("#prompt", prompt)
        self.tab.fill("#max-tokens", str(tokens))
        self.tab.fill("#last", last)
        self.tab.click("#run")

    def trace(self, *of: Any, **options: Any) -> None:
        self.ask(*of, **options)
        self.finished()

    def finished(self) -> None:
        """Wait for the end of a run."""
        self.wait("#status", "tokens traced at")
        self.drawn()

    def reach(self, selector: str) -> dict[str, bool]:
        """Press Tab until the focus is in an element; whether each stop was seen to have it."""
        seen = {}
        for _ in range(40):
            self.tab.keyboard.press("Tab")
            stop = self.focused("id") or self.focused("getAttribute('role')")
            seen[stop] = self.focused("matches(':focus-visible')")
            if self.focused(f"matches('{selector}')"):
                return seen
        raise AssertionError(f"{selector} is not among {list(seen)}")

    def drawn(self) -> None:
        for name in PICTURES:
            self.tab.locator(f"#{name} svg").wait_for()

    def cells(self, picture: str = "weights") -> int:
        return self.tab.locator(f"#{picture} [role=gridcell]").count()

    def cell(self, row: int, column: int, picture: str = "weights"):
        return self.tab.locator(f'#{picture} [data-row="{row}"][data-column="{column}"]')

    def focused(self, what: str) -> str:
        """Something of the element that has the focus."""
        return self.tab.evaluate(f"document.activeElement.{what}")

    def chosen(self) -> int:
        (index,) = self.tab.eval_on_selector_all(
            "#tokens [aria-selected=true]", "found => found.map(one => Number(one.dataset.index))"
        )
        return index

    def download(self, selector: str) -> tuple[str, str]:
        with self.tab.expect_download() as waiting:
            self.tab.click(selector)
        return waiting.value.suggested_filename, Path(waiting.value.path()).read_text()

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


@pytest.fixture
def shown(visit, tmp_path) -> Callable[..., Visit]:
    """The HTML file of a trace, drawn in a tab of some width."""
    file = tmp_path / "trace.html"

    def show(trace: dict[str, Any], width: int = 1280) -> Visit:
        file.write_text(inspect_page.html(trace))
        found = visit(viewport={"width": width, "height": 800})
        found.tab.goto(file.as_uri())
        found.drawn()
        return found

    return show


def run_on(visit, server: MadeUpServer, words: str, size=(1280, 900), **options) -> Visit:
    """The page with a run that its address asks of a made-up server, on a screen of some size."""
    width, height = size
    found = visit(viewport={"width": width, "height": height}, base_url=SITE, **options)
    server.serve(found.tab)
    found.tab.goto(f"/attn_res#{words}")
    found.finished()
    return found


def test_the_file_in_a_browser(shown, tmp_path):
    """Nothing is loaded; hostile texts are texts; deep models fit, also on a phone."""
    texts = [*HOSTILE, " def", "\n\n", "\t", None, "", "é", "\x00", "\ufffd"] * 3
    edits = [{"sites": [3, "final"], "sources": ["block 1"], "mask": True}]
    for layers, block, width in ((2, 2, 1280), (28, 7, 390), (24, 1, 390)):
        trace = made_up_trace(layers, block, texts) | {"edits": edits}
        found = shown(trace, width)
        assert json.loads(found.text("#trace")) == trace
        policy = found.tab.locator("meta[http-equiv]").get_attribute("content")
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
        assert found.cells() == sum(len(site["sources"]) for site in trace["sites"])
        assert not found.overflows()
        tokens = found.tab.locator("#tokens [role=option]").all_text_contents()
        assert tokens[:2] == [text.replace(" ", "·") for text in HOSTILE[:2]]
        assert tokens[2:7] == ["<!--", "U+202E", "·def", "↵↵", "⇥"]
        assert tokens[7:12] == ["#107", "#108", "é", "U+0000", "#111"]
        assert found.tab.evaluate("typeof hacked") == "undefined"
        assert found.text("#model") == "made up"
        assert found.tab.locator("#edited").is_visible()
        name = "attention of layer 0" if block == 1 else "block 1"
        assert found.text("#edited") == f"Edited: {name} masked at sites 3, final, all tokens."
        assert found.errors == []
        assert found.asked == {(tmp_path / "trace.html").as_uri()}
        assert found.tab.locator("form").count() == 0


@pytest.mark.parametrize(
    ("layers", "block", "site", "names"),
    [
        (3, 1, 3, ["embedding", "attention of layer 0", "MLP of layer 0", "attention of layer 1"]),
        (2, 2, 3, ["embedding", "block 1", "partial sum"]),
        (4, 4, 4, ["embedding", "block 1"]),
    ],
)
def test_sources_have_names(shown, layers, block, site, names):
    """Those of a Full model are sublayers, in tables, at the map of tokens and in an edit."""
    edit = {"sites": [site], "sources": [f"block {block}"[:7]], "mask": True}
    found = shown(made_up_trace(layers, block, ["a", " ", "\n"]) | {"edits": [edit]})
    for column, name in enumerate(names):
        found.cell(site, column).click()
        assert found.text("#readout p").endswith(f", reads {name}")
        assert found.text("#coloured-by").endswith(f" on {name}.")
    said = found.tab.locator("#over-tokens text").all_text_contents()
    assert said[: len(names)] == names
    if block == 1:
        assert found.text("#edited").startswith("Edited: attention of layer 0 masked at site 3,")
        below = found.tab.locator("#weights text").all_text_contents()
        assert below[-4:-1] == ["emb", "1", "2"] or below[-5:-1] == ["emb", "0", "1", "2"]
    assert found.errors == []


def test_tokens_are_quoted_so_that_blanks_are_seen(shown):
    """In tables and where one is chosen: with all of its blanks as the browser lays them out."""
    texts = [" ", "\n\n", "\t", '"', "\u202e", "\xa0", None, "é", "a  b", "\u200bx", "\ufffd", ""]
    quotes = ['" "', r'"\n\n"', r'"\t"', r'"\""', r'"\u{202E}"', r'"\u{00A0}"', "id 6"]
    quotes += ['"é"', '"a  b"', r'"\u{200B}x"', "id 10", "id 11"]
    likely = [{"id": at, "text": text, "logprob": -1.0} for at, text in enumerate(texts)]
    trace = made_up_trace(1, 2, texts)
    rows = [{"position": 0, "next": None, "top": likely}]
    trace["lens"] = [
        {"site": site, "vector": name, "predictions": rows}
        for site in (None, 0, 1, 2)
        for name in ("mix", "embedding", "block 1", "partial")
    ]
    for token in trace["tokens"]:
        token["id"] = token["position"]
    found = shown(trace)
    for at, quoted in enumerate(quotes):
        found.tab.locator("#tokens [role=option]").nth(at).click()
        said = f"{quoted} (id {at})" if quoted[0] == '"' else quoted
        text = found.tab.locator("#chosen").inner_text()
        assert text.startswith(f"Chosen: token {at}, {said}, of ")
    found.tab.locator("#tokens [role=option]").first.click()
    found.cell(1, 0).click()
    assert found.tab.locator("#readout tbody th.token").all_text_contents() == quotes
    assert found.errors == []


def test_colours_and_quantiles_are_those_of_the_command(shown):
    """What the page computes by itself, against matplotlib and numpy."""
    found = shown(made_up_trace(2, 2, ["a", "b", "c"]))
    values = [0, 1e-4, 0.003, 0.02, 0.1, 0.33, 0.5, 0.77, 1]
    for sources, root in ((figure.FEW_SOURCES, 2), (figure.FEW_SOURCES + 1, 3)):
        ours = found.tab.evaluate(
            "([n, values]) => values.map(modules['colours.js'].weightScale(n).colour)",
            [sources, values],
        )
        assert is_coloured(ours, values, root)
    for values in ([3.0], [1.0, 5.0, 2.0], [random.Random(1).random() for _ in range(37)]):
        ours = found.tab.evaluate("values => modules['trace.js'].spread(values)", values)
        np.testing.assert_allclose(ours, np.percentile(values, (10, 90)), rtol=1e-12)
    steps = found.tab.evaluate(
        "[modules['svg.js'].ticks(1.61, 4), modules['svg.js'].ticks(230, 3)]"
    )
    assert steps == [[0, 0.5, 1, 1.5], [0, 100, 200]]


def texts_of(saved: str) -> list[str]:
    """The texts of a saved figure in their order."""
    drawn = ElementTree.fromstring(saved)
    assert drawn.tag == f"{SVG}svg"
    return ["".join(one.itertext()) for one in drawn.iter(f"{SVG}text")]


KINDS = {"attention", "MLP", "final norm"}
RANGE = {"mean over tokens", "10 to 90 % of tokens", "chosen token"}
LAYERS = {"layer", "0", "1", "final"}
EXAMPLE = json.loads((page.FOLDER / "example.json").read_text())


@pytest.mark.parametrize(
    ("trace", "width", "own"),
    [
        (
            made_up_trace(2, 2, ["a", " b", "\n", "c"]),
            1440,
            {"weights": {"partial sum"}, "magnitude": {"finished block"}},
        ),
        pytest.param(
            made_up_trace(6, 3, ["a", None])
            | {"edits": [{"sites": [1], "sources": ["partial"], "mask": True}]},
            1000,
            {"second": {"partial sum"}},
            marks=pytest.mark.exhaustive,
        ),
        (made_up_trace(3, 1, ["a"]), 390, {"magnitude": {"embedding", "attention", "MLP"}}),
        (EXAMPLE, 1200, {"lens": LAYERS | {"probability of the token"}}),
    ],
    ids=["blocks", "edited", "full", "lens"],
)
def test_a_saved_figure_stands_alone(visit, shown, tmp_path, trace, width, own):
    """It has its scale, legend and layers, all as text within its frame, at every width."""
    found = shown(trace, width)
    assert not found.overflows()
    wanted = {
        "weights": KINDS | LAYERS,
        "second": KINDS | LAYERS,
        "magnitude": RANGE | LAYERS,
        "entropy": KINDS | RANGE | LAYERS | {"even weights"},
        "over-tokens": {"embedding", "chosen token"},
    }
    other = visit(viewport={"width": 1600, "height": 900}).tab
    for picture in wanted | own:
        title = found.tab.locator(f"#{picture} svg").get_attribute("aria-label")
        _, saved = found.download(f"#{picture} figcaption > button")
        texts = texts_of(saved)
        assert texts[0] == title and "[object" not in title
        assert wanted.get(picture, set()) | own.get(picture, set()) <= set(texts), picture
        assert texts.count("layer") == (picture != "over-tokens")
        if picture in ("weights", "second", "over-tokens"):
            name = texts.index("weight")  # of the scale, behind its numbers
            assert texts[name - 1] == "1" and "0" in texts[:name][-9:]
        path = tmp_path / f"{picture}.svg"
        path.write_text(saved)
        other.goto(path.as_uri())
        assert other.evaluate(CUT_OFF) == [], picture
    assert found.errors == []


@pytest.mark.parametrize(
    ("layers", "block", "weights", "prompt", "tokens", "said", "traced", "lens"),
    [
        pytest.param(  # all of it has room
            *(8, 4, 2**18, 10, 24, "", 34, 34), marks=pytest.mark.exhaustive
        ),
        (24, 12, 2**18, 90, 24, " The depth lens is of the last 41 tokens, because", 114, 41),
        pytest.param(
            *(64, 1, 2**18, 3000, 0, " These are the last of 3000 tokens, and the depth", 31, 15),
            marks=pytest.mark.exhaustive,
        ),
        (24, 1, 2**15, 3000, 0, " These are the last of 3000 tokens, and the depth", 26, 21),
        pytest.param(
            *(8, 1, 2000, 30, 24, " These are the last of 54 tokens, and the depth", 12, 7),
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_what_has_no_room_is_left_out(
    visit, layers, block, weights, prompt, tokens, said, traced, lens
):
    """The last tokens are traced, the lens reads the last of those, and a sentence says so."""
    server = MadeUpServer(layers, block, weights)
    found = run_on(visit, server, f"max_tokens={tokens}&prompt={'a' * min(prompt, 1900)}")
    if prompt > 1900:
        server.asked.clear()
        found.trace("a" * prompt, tokens)
    assert found.text("#error") == "" and found.errors == []
    start = re.escape(f"{traced} tokens traced at {2 * layers + 1} sites.{said}")
    assert re.match(start, found.text("#status"))
    assert found.tab.locator("#tokens [role=option]").count() == traced
    asked = [body for body in server.asked if body.get("sites") != []]
    assert len(asked) == (1 if lens == traced else 2)
    assert found.tab.locator("#lens text").first.text_content() == "↵··x"
    if lens < traced:
        assert prompt + tokens - asked[-1]["tokens"]["start"] == lens
        found.tab.locator("#tokens [role=option]").first.click()
        assert found.text("#lens .plot").startswith("not read for")


@pytest.fixture(scope="module")
def server(browser, keyed_server) -> Server:
    return keyed_server


@pytest.fixture
def opened(visit, server) -> Visit:
    """The page with its example, of a server that asks for no key, as far as the page can see."""
    found = visit(
        extra_http_headers={"authorization": f"Bearer {KEY}"},
        accept_downloads=True,
        viewport={"width": 1440, "height": 900},
    )
    found.tab.goto(f"{server.url}/attn_res")
    found.finished()
    return found


@pytest.mark.engine
def test_the_first_screen(opened):
    """A finished example, unasked: the model's name, tokens and figures in view, on one screen."""
    tab = opened.tab
    assert opened.text("#model") == "demo: house format, llama, 4 blocks, 17 sites"
    for name in ("tokens", "follows", *PICTURES, "lens", "over-tokens"):
        box = tab.locator(f"#{name}").bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 900, name
        assert box["height"] > 50 and box["x"] + box["width"] <= 1440, name
    assert tab.locator("#help img").evaluate("image => image.naturalWidth") > 0
    examples = tab.locator(".example")
    assert examples.count() == 3
    examples.nth(1).click()
    opened.finished()
    assert opened.text("#tokens").startswith("<s>def·write")
    assert len([path for path in opened.posted if path.endswith("/trace")]) == 2

    tab.set_viewport_size({"width": 390, "height": 844})  # a phone: the strip of tokens stays
    tab.locator("#entropy svg[width^='1']").wait_for()
    tab.locator("#over-tokens").scroll_into_view_if_needed()
    assert tab.locator("#tokens").bounding_box()["y"] >= 0
    assert not opened.overflows()


@pytest.mark.engine
def test_a_completion_and_its_trace(opened, server):
    """Traced as shown, chosen by click and keys, pointed at, saved, light and dark."""
    tab = opened.tab
    opened.trace()
    assert "17 sites" in opened.text("#status") and opened.text("#error") == ""
    assert not tab.locator("#key-field").is_visible()

    name, text = opened.download("#json")
    trace = json.loads(text)
    answer = server.complete(PROMPT, max_tokens=12)
    given = answer["usage"]["prompt_tokens"]
    assert name == "attn-res-trace.json"
    assert trace["prompt_tokens"] == given
    assert (
        "".join(token["text"] for token in trace["tokens"][given:]) == answer["choices"][0]["text"]
    )
    assert tab.locator("#tokens .prompt").count() == given
    assert tab.locator("#tokens .answer").count() == len(trace["tokens"]) - given == 12
    assert opened.cells() == opened.cells("second")
    assert opened.cells() == sum(len(site["sources"]) for site in trace["sites"])

    last = len(trace["tokens"]) - 1
    assert opened.chosen() == last
    tab.locator("#tokens [role=option]").nth(3).click()
    assert opened.chosen() == 3
    for row, site in enumerate(trace["sites"]):
        fills = [opened.cell(row, at).get_attribute("fill") for at in range(len(site["sources"]))]
        assert is_coloured(fills, site["weights"][3])
    shown = tab.locator("#follows li").all_text_contents()
    top = trace["logprobs"]["unedited"][3]["top"]
    assert len(top) == 5
    for text, likely in zip(shown, top, strict=False):
        assert float(re.search(r"[\d.e-]+(?=follows|$)", text)[0]) == pytest.approx(
            math.exp(likely["logprob"]), rel=0.01
        )
    assert "follows" in "".join(shown)
    for key, index in (("Right", 4), ("Left", 3), ("Home", 0), ("Left", 0), ("End", last)):
        tab.keyboard.press(key if key in ("Home", "End") else f"Arrow{key}")
        assert opened.chosen() == index
        assert int(opened.focused("dataset.index")) == index
    tab.keyboard.press("ArrowUp")
    assert 0 < opened.chosen() < last
    tab.keyboard.press("ArrowDown")
    tab.locator(f'#entropy svg[aria-label*="token {opened.chosen()},"]').wait_for()

    opened.cell(1, 0).hover()
    assert opened.text("#readout p") == "Site 1, MLP of layer 0, reads embedding"
    numbers = [site["weights"][opened.chosen()][0] for site in trace["sites"][1:2]]
    assert float(opened.text("#readout tbody td >> nth=0")) == pytest.approx(numbers[0], rel=0.01)
    background = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(background) == "rgb(243, 245, 248)"
    tab.click("#theme")
    tab.locator('#entropy svg[fill="#e4e9f0"]').wait_for()
    assert tab.evaluate(background) == "rgb(14, 17, 22)"
    assert opened.errors == []
    assert {urlsplit(url).netloc for url in opened.asked if not url.startswith("blob:")} == {
        urlsplit(server.url).netloc
    }


@pytest.mark.engine
def test_a_cell_by_keyboard_alone(opened):
    """It colours the tokens, is masked, and the edited run is told apart from the one before."""
    tab = opened.tab
    tab.keyboard.press("Control+Home")
    reached = opened.reach("#weights [role=gridcell]")
    for key in ("Home", *["ArrowUp"] * 16, *["ArrowDown"] * 11, "ArrowRight", "ArrowLeft"):
        tab.keyboard.press(key)
    assert (opened.focused("dataset.row"), opened.focused("dataset.column")) == ("11", "0")
    said = opened.focused("ariaLabel")
    assert said.startswith("Site 11, MLP of layer 5, reads embedding; weight ")
    assert said.startswith(f"{opened.text('#readout p')}; weight ")
    for cell in tab.locator("#readout tbody :is(th, td)").all_text_contents():
        assert cell.removeprefix("entropy, ") in said or "to" in cell
    tab.keyboard.press("Enter")
    trace = json.loads(opened.download("#json")[1])
    colours = tab.eval_on_selector_all(
        "#tokens [role=option]", "all => all.map(one => one.style.backgroundColor)"
    )
    weights = [row[0] for row in trace["sites"][11]["weights"]]
    assert is_coloured(colours, weights) and max(weights) > 2 * min(weights)
    assert opened.cells("over-tokens") == 4 * len(trace["tokens"])
    row = tab.eval_on_selector_all(
        "#over-tokens [data-row='0']", "all => all.map(one => one.getAttribute('fill'))"
    )
    assert is_coloured(row, weights)

    tab.focus("#keep")
    tab.keyboard.press("Enter")
    reached |= opened.reach("#mask")
    tab.keyboard.press("Enter")
    assert opened.text("#edit-list li").startswith("embedding masked at site 11, all tokens")
    assert opened.text("#run") == "Complete with edits"
    tab.keyboard.press("Control+Enter")  # from the button that has the focus, which is not pressed
    tab.locator("#edited").wait_for()
    opened.finished()
    assert opened.text("#edited") == "Edited: embedding masked at site 11, all tokens."
    edited = json.loads(opened.download("#json")[1])
    assert [(edit["sites"], edit["sources"], edit["mask"]) for edit in edited["edits"]] == [
        ([11], ["embedding"], True)
    ]
    assert {weights[0] for weights in edited["sites"][11]["weights"]} == {0}
    texts = [
        "".join(token["text"] for token in one["tokens"][one["prompt_tokens"] :])
        for one in (trace, edited)
    ]
    assert texts[0] != texts[1]
    assert [opened.text(f"#answer-{name}") for name in ("before", "after")] == texts
    assert tab.locator("#follows .run").count() == 2
    assert not tab.locator("#follows .token").evaluate_all(
        "all => all.some(one => one.scrollWidth > one.clientWidth)"
    )
    assert re.match(r"Compared with the baseline: <s>import.*, without edits", opened.text("#kept"))
    file = inspect_page.html(edited)
    assert '"mask":true' in file

    assert opened.tab.locator("#mode").input_value() == "difference"
    means = [
        np.mean([weights[0] for weights in one["sites"][11]["weights"]]) for one in (trace, edited)
    ]
    (row,) = tab.locator("#readout tr", has_text="difference from baseline").all()
    assert float(row.locator("td").nth(1).text_content()) == pytest.approx(
        means[1] - means[0], rel=0.01
    )
    assert reached == dict.fromkeys(reached, True)  # the focus is seen wherever it was
    assert opened.errors == []

    again = opened.tab.context.new_page()  # what the address says, and nothing else
    other = Visit(again)
    again.goto(tab.url)
    again.locator("#edited").wait_for()
    other.finished()
    assert other.text("#tokens") == opened.text("#tokens")
    assert other.text("#chosen") == opened.text("#chosen")
    assert other.text("#coloured-by") == opened.text("#coloured-by")
    assert other.posted.count("/v1/completions") == 1
    other.posted.clear()
    again.goto(re.sub("max_tokens=24", "max_tokens=65", tab.url))
    other.wait("#status", "Press “Complete with edits” to run the prompt of the link.")
    assert other.posted == []


@pytest.mark.engine
def test_other_ways_to_a_trace(opened, tmp_path):
    """Without an answer, a chat, a sample, and a saved file."""
    tab = opened.tab
    tab.click("#options summary")
    opened.posted.clear()
    opened.trace(tokens=0, last="3")
    assert tab.locator("#tokens .prompt").count() == 3
    assert tab.locator("#tokens .answer").count() == 0
    assert set(opened.posted) == {"/v1/attn_res/trace"}

    tab.fill("#last", "")
    tab.check("#chat")
    tab.fill("#temperature", "1")
    opened.posted.clear()
    answers = set()
    for seed in ("1", "2", "1"):
        tab.fill("#seed", seed)
        opened.trace(tokens=8)
        answers.add("".join(tab.locator("#tokens .answer").all_text_contents()))
    assert len(answers) == 2
    assert opened.text("#tokens").startswith("<s>#·user:·")
    assert opened.posted.count("/v1/chat/completions") == 3

    saved = tmp_path / "saved.json"
    trace = made_up_trace(3, 2, ["a", "b"])
    saved.write_text(json.dumps(trace))
    tab.select_option("#scope", "token")
    tab.click("#force")
    assert re.match(r"\S.* forced at site \d+, token \d+ ", opened.text("#edit-list"))

    tab.set_input_files("#open", saved)
    opened.wait("#model", "made up, from saved.json")
    assert opened.cells() == sum(len(site["sources"]) for site in trace["sites"])
    assert opened.text("#status") == "saved.json is shown, not a run of this prompt."
    assert opened.text("#edit-list") == ""
    tab.locator("#tokens [role=option]").first.click()
    tab.wait_for_timeout(400)  # longer than the pause before an address is written
    assert "#" not in tab.url
    assert tab.locator("#mask").is_disabled() and tab.locator("#force").is_disabled()
    trace["sites"][2]["rms"].pop()
    dropped = tab.evaluate_handle(
        "text => { const held = new DataTransfer();"
        " held.items.add(new File([text], 'dropped.json')); return held; }",
        json.dumps(trace),
    )
    tab.dispatch_event("body", "drop", {"dataTransfer": dropped})
    opened.wait("#unopened", "sites[2].rms needs a row for each of 2 tokens.")
    opened.trace(tokens=2)
    assert tab.locator("#force").is_enabled()
    tab.wait_for_url("**#*max_tokens=2*")
    assert opened.errors == []


@pytest.mark.parametrize(
    ("prompt", "clipboard"),
    [("def f(x):\n    " + "a" * 300, True), ("ü & # % +", False)],
    ids=["long", "not offered"],
)
def test_copy_link(visit, prompt, clipboard):
    """The address holds prompt, options and what is chosen, at once, over http as well."""
    found = visit(
        viewport={"width": 1280, "height": 900},
        base_url=SITE,
        permissions=["clipboard-read", "clipboard-write"],
    )
    if not clipboard:
        found.tab.add_init_script("delete Navigator.prototype.clipboard")
    MadeUpServer(3, 2).serve(found.tab)
    found.tab.goto("/attn_res#max_tokens=2&prompt=x")
    found.finished()
    found.trace(prompt, 3)
    found.cell(4, 1).click()
    found.tab.click("#copy")
    found.wait("#copied", "The link is copied.")
    found.tab.fill("#prompt", "")
    found.tab.focus("#prompt")
    found.tab.keyboard.press("Control+v")
    link = found.tab.locator("#prompt").input_value()
    assert link == found.tab.url
    found.tab.goto("about:blank")
    found.tab.goto(link)
    found.finished()
    assert found.tab.locator("#prompt").input_value() == prompt
    assert found.tab.locator("#max-tokens").input_value() == "3"
    assert found.text("#readout p") == "Site 4, attention of layer 2, reads block 1"
    assert found.errors == []


def test_without_the_key_there_is_an_example(visit):
    """It is asked for kindly, and the saved run has no link; with the key the page is as usual."""
    found = visit(viewport={"width": 1280, "height": 900}, base_url=SITE)
    MadeUpServer(3, 2, key=KEY).serve(found.tab)
    found.tab.goto("/attn_res")
    found.wait("#status", "This server asks for an API key.")
    found.drawn()
    assert found.text("#error") == "" and found.text("#model") == "demo, a saved example"
    predicted = found.tab.locator("#lens text").all_text_contents()
    assert "):" in predicted and "U+0019" not in predicted  # at a token that shows something
    assert found.cells() > 40 and found.tab.locator("#lens").is_visible()
    assert found.tab.locator("#copy").is_disabled() and found.tab.locator("#mask").is_disabled()
    found.tab.click("#run")
    found.wait("#status", "This server asks for an API key.")
    for key, said in (
        ("another", "This is not the server's API key."),
        ("schlüssel", "An API key has printable ASCII characters only."),
    ):
        found.tab.fill("#key", key)
        found.tab.click("#run")
        found.wait("#error", said)
    found.tab.fill("#key", KEY)
    found.trace("abc", 4)
    assert found.text("#model").startswith("made up: ")
    assert found.text("#error") == "" and found.tab.locator("#copy").is_enabled()
    stored = "localStorage.length + sessionStorage.length + document.cookie.length"
    assert found.tab.evaluate(stored) == 0
    assert all(KEY not in url for url in found.asked)
    assert all("401" in error for error in found.errors)


@pytest.mark.engine
def test_refusals_are_shown_as_the_server_says_them(opened, server):
    body = {"prompt": PROMPT, "max_tokens": 5000}
    said = server.client.post("/v1/completions", json=body).json()["error"]["message"]
    opened.ask(tokens=5000)
    opened.tab.locator("#error:not(:empty)").wait_for()
    assert opened.text("#error") == said
    assert opened.tab.locator("#right").is_visible()
    assert opened.text("#previous") == "Previous run: the last request gave no trace."
    assert opened.tab.locator("#run").is_enabled()

    said = "logprobs is 5; expected at most 0 (--max-logprobs)."
    opened.tab.route(
        "**/v1/attn_res/trace",
        lambda route: (
            route.fulfill(status=400, json={"error": {"message": said}})
            if "logprobs" in route.request.post_data
            else route.continue_()
        ),
    )
    opened.trace(tokens=3)
    assert opened.text("#status").endswith(f"Without predictions: {said}")
    assert opened.tab.locator("#follows-card").is_hidden()

    said = "This server was started with --disable-trace."
    opened.tab.route(
        "**/v1/attn_res/trace",
        lambda route: route.fulfill(status=403, json={"error": {"message": said}}),
    )
    opened.ask(tokens=3)
    opened.wait("#error", said)
    assert opened.text("#stream").startswith(PROMPT)  # the answer stays
    assert opened.text("#status") == ""

    opened.tab.route("**/v1/completions", lambda route: route.abort())
    opened.tab.click("#run")
    opened.wait("#error", "The server does not answer; is it still running?")


@pytest.fixture(params=[(1440, 900), (390, 844)], ids=["screen", "phone"])
def made_up_page(request, visit) -> tuple[Visit, MadeUpServer]:
    """The page with a run, of a made-up server, on a screen and on a phone."""
    server = MadeUpServer(4, 4)
    return run_on(visit, server, "max_tokens=3&prompt=abc", request.param), server


TRACE = re.compile("/v1/attn_res/trace$")
ANSWER = re.compile("/v1/(chat/)?completions$")
SILENT = "The server does not answer; is it still running?"
CUT = "The connection ended before the answer did."
BUSY = {"error": {"message": "The server answers 4 requests already; try again."}}


def test_retry_asks_the_same_again(made_up_page):
    """Where the server went away, or is busy, and then is there again, maybe with another model."""
    found, server = made_up_page
    for route, how, said in (
        (ANSWER, "connectionrefused", SILENT),
        (TRACE, "connectionreset", SILENT),
        (ANSWER, {"body": "data: {"}, CUT),
        (TRACE, {"body": '{"tokens": ['}, CUT),
        (ANSWER, {"status": 502, "body": "<p>bad"}, "The server answered with status 502."),
        (TRACE, {"status": 429, "json": BUSY}, BUSY["error"]["message"]),
    ):

        def away(one, _, how=how) -> None:
            one.abort(how) if isinstance(how, str) else one.fulfill(**how)

        found.tab.route(route, away)
        server.asked.clear()
        found.posted.clear()
        found.ask("defg", 2)
        found.wait("#error", said)
        assert found.tab.locator("#previous").is_visible()  # the run before stays
        tried = [*found.posted]
        found.tab.focus("#retry")
        found.tab.keyboard.press("Enter")
        found.wait("#error", said)
        assert found.posted == tried * 2
        assert found.focused("id") == "run"  # its own is gone in between
        found.tab.unroute(route)
        found.asked.clear()
        found.tab.click("#retry")
        found.finished()
        assert f"{SITE}/v1/attn_res" in found.asked
        assert found.text("#tokens").startswith("defg")
        assert {len(body["prompt"]) for body in server.asked} == {6}
        assert found.text("#error") == "" and found.tab.locator("#retry").is_hidden()


def test_an_error_goes_when_the_input_changes(made_up_page):
    """With its button; a refusal has none, for it would come again."""
    found, _ = made_up_page
    tab = found.tab
    changes = {
        "prompt": lambda: tab.locator("#prompt").press("x"),
        "option": lambda: tab.fill("#max-tokens", "2"),
        "edit": lambda: tab.click("#mask"),
        "chat": lambda: tab.click("#chat"),
        "link": lambda: tab.evaluate("location.hash = 'max_tokens=65&prompt=y'"),
    }
    for change, act in changes.items():
        status = 503 if change in ("prompt", "edit") else 400
        refusal = {"status": status, "json": {"error": {"message": "Refused."}}}
        tab.route(ANSWER, lambda one, _, how=refusal: one.fulfill(**how))
        found.ask("defg", 1)
        found.wait("#error", "Refused.")
        assert tab.locator("#retry").is_visible() == (status == 503)
        act()
        tab.locator("#error:empty").wait_for(state="attached")
        assert tab.locator("#retry").is_hidden(), change
        tab.unroute(ANSWER)
    tab.set_input_files("#open", {"name": "x.json", "mimeType": "", "buffer": b"{}"})
    found.wait("#unopened", "This is not a trace")
    changes["prompt"]()
    tab.locator("#unopened:empty").wait_for(state="attached")


def test_the_button_of_the_theme_says_what_it_gives(made_up_page):
    """Its name is its text, in either theme, chosen or the system's, and it has no state."""
    found, _ = made_up_page
    other = {"light": "Dark theme", "dark": "Light theme"}

    def offers(theme: str) -> None:
        button = found.tab.get_by_role("button", name=other[theme], exact=True)
        button.wait_for()
        assert found.text("#theme") == other[theme]
        assert button.get_attribute("aria-pressed") is None
        assert (
            found.tab.evaluate("getComputedStyle(document.body).backgroundColor")
            == ({"light": "rgb(243, 245, 248)", "dark": "rgb(14, 17, 22)"}[theme])
        )

    for theme in ("light", "dark"):
        found.tab.emulate_media(color_scheme=theme)
        offers(theme)
    for theme in ("light", "dark"):
        found.tab.click("#theme")
        offers(theme)
    assert found.errors == []


SMALL = """() => {
  const targets = "button, .button, a, select, summary, textarea, input:not(#open), [role=option]";
  const cells = "#weights [role=gridcell], #second [role=gridcell]";
  const found = [...document.querySelectorAll(`${targets}, ${cells}`)];
  const size = (one) => one.getClientRects()[0];
  return found
    .filter((one) => one.checkVisibility() && Math.min(size(one).width, size(one).height) < 23.9)
    .map((one) => `${one.id || one.outerHTML} ${size(one).width} ${size(one).height}`);
}"""


def test_the_mean_of_what_is_served(visit):
    """Over the tokens of prompts and answers, beside the map of the token; a file has none."""
    server = MadeUpServer(4, 4)
    found = run_on(visit, server, "max_tokens=3&prompt=iii.")
    found.tab.select_option("#mode", "served")
    found.tab.locator(
        '#second svg[aria-label="Depth attention, mean of what is served"]'
    ).wait_for()
    for row, site in enumerate(server.client.get("/v1/attn_res/statistics").json()["sites"]):
        means = [np.array(site[phase]["mean"]) for phase in ("prefill", "decode")]
        mean = (4 * means[0] + 12 * means[1]) / 16
        fills = [found.cell(row, at, "second").get_attribute("fill") for at in range(len(mean))]
        assert is_coloured(fills, mean)
    trace = json.dumps(made_up_trace(4, 4, ["a"])).encode()
    file = {"name": "x.json", "mimeType": "application/json", "buffer": trace}
    found.tab.set_input_files("#open", file)
    found.tab.locator('#mode option[value="served"]:disabled').wait_for(state="attached")
    assert found.tab.locator("#mode").input_value() == "mean" and found.errors == []


def test_a_finger_finds_what_it_presses(visit):
    """24 pixels either way on a phone: cells of a model that is not too deep among them."""
    server = MadeUpServer(8, 4)
    found = run_on(visit, server, "max_tokens=3&prompt=iii.", (390, 844), has_touch=True)
    found.tab.click("#options summary")
    found.cell(3, 0).tap()
    found.tab.tap("#mask")
    found.cell(3, 1).tap()
    found.tab.tap("#force")
    assert found.tab.locator("#edit-list button").count() == 2
    assert found.tab.evaluate(SMALL) == []
    assert not found.overflows()
    bar = found.tab.locator("#run").bounding_box()
    assert bar["y"] + bar["height"] <= 844  # in view where the cells are
    found.tab.tap("#run")
    found.finished()
    found.tab.tap("#help")
    assert found.tab.evaluate(SMALL) == []
    assert found.errors == []


@pytest.mark.parametrize(
    ("texts", "width"), [(["a", None], 1440), (["a", "\ufffd"], 390), (["a", " "], 390)]
)
def test_an_id_in_place_of_a_text_is_explained(shown, texts, width):
    """In the legend of the page and of a saved figure, and at the token; only if there is one."""
    has = texts[1] != " "
    found = shown(made_up_trace(2, 2, texts), width)
    said = "id of a token without text"
    tokens = found.tab.locator("#tokens [role=option]").all()
    titles = [None, "id 101: a token without text of its own" if has else None]
    assert [token.get_attribute("title") for token in tokens] == titles
    assert (said in found.tab.locator("#legend text").all_text_contents()) == has
    assert (said in texts_of(found.download("#over-tokens figcaption > button")[1])) == has
    assert said not in texts_of(found.download("#weights figcaption > button")[1])
    found.tab.click("#help")
    assert "#151" in found.tab.locator("#guide").inner_text()
    assert not found.overflows() and found.errors == []


@pytest.mark.engine
def test_a_refused_edit_is_no_dead_end(opened):
    """The trace before it stays and is marked; its edits can be removed, also after a reload."""
    tab = opened.tab
    opened.cell(0, 0).click()
    assert tab.locator("#mask").is_disabled()  # nothing would be left to read
    for column in (0, 1):
        opened.cell(1, column).click()
        tab.click("#mask")
    tokens = opened.text("#tokens")
    tab.click("#run")
    opened.wait("#error", "leaves site 1 (the MLP of layer 0) no source")
    assert opened.text("#tokens") == tokens
    assert tab.locator("#previous").is_visible()
    assert tab.locator("#edit-list button").count() == 2
    tab.wait_for_url("**#*edits=*")
    tab.reload()
    opened.wait("#error", "leaves site 1 (the MLP of layer 0) no source")
    assert tab.locator("#right").is_hidden()
    tab.locator("#edit-list button").first.click()
    assert opened.text("#error") == ""
    tab.click("#run")
    opened.finished()
    assert opened.text("#edited") == "Edited: partial sum masked at site 1, all tokens."
    assert tab.locator("#previous").is_hidden()
    assert tab.locator("#clear-edits").is_hidden()  # it would do the same
    tab.locator("#edit-list button").click()
    assert opened.text("#edits-hint").startswith("The figures are still those of the edited run.")
    assert opened.text("#run") == "Complete without edits"
    tab.click("#run")
    tab.locator("#edited").wait_for(state="hidden")
    assert opened.text("#tokens") == tokens
    assert opened.text("#run") == "Complete and trace" and opened.text("#edits-hint") == ""


@pytest.mark.engine
def test_cancel(opened, server):
    """It ends the request, which is shown piece by piece, and the next one is answered.

    A short answer may be complete by then; its trace is held.
    """
    opened.tab.evaluate(
        "growing = new Set(); new MutationObserver(() => growing.add("
        "document.querySelector('#stream .answer')?.textContent)).observe("
        "document.getElementById('stream'), {childList: true, subtree: true})"
    )
    opened.tab.route("**/v1/attn_res/trace", lambda _: None)
    opened.ask(tokens=900)
    until(lambda: opened.tab.evaluate("growing.size") > 4, 120)
    opened.tab.click("#cancel")
    opened.wait("#status", "Cancelled.")
    opened.tab.unroute("**/v1/attn_res/trace")
    assert opened.cells() > 0 and opened.tab.locator("#previous").is_visible()
    assert not opened.tab.locator("#cancel").is_enabled()
    opened.trace(tokens=2)
    assert opened.text("#error") == "" and opened.tab.locator("#previous").is_hidden()
    assert opened.errors == []
