"""``inspect --importance``: pairs, files, what goes on after an interruption, what is chosen."""

import csv
import json
import math
import shlex

import httpx
import numpy as np
import pytest
from inspecting import inspect, refused
from serving import DEMO

from attnres_serve.depth import edit_text
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.lens import figure, losses
from attnres_serve.lens.losses import increase
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing.answer import TracedSite

SITES = [site for site in sites(AttnResSpec.uniform(Layout.of(3), 2, 1e-6)) if site.mixes]
MASKS = [(site.index, name) for site in SITES if len(site.sources) > 1 for name in site.sources]
# As many words as tokens; lengths and losses differ, so that each has its place.
TEXTS = [" ".join(f"w{at}" for at in range(2 + 5 * at % 11)) for at in range(10)]
TOKENS = np.array([len(text.split()) - 1 for text in TEXTS])
NOTHING: tuple = ()


def cost(mask: tuple[int, str]) -> float:
    """Nats per token of a mask alone; no two masks have one."""
    return (MASKS.index(mask) - 4) / 64


def nats(text: str, masks: tuple) -> float:
    """Of all tokens of a text; a text of an odd number of tokens has twice the cost of a mask."""
    count = len(text.split()) - 1
    return count * (count / 3 + (1 + count % 2) * sum(map(cost, masks)))


def masks_of(edits: list[dict]) -> tuple:
    """The sites and sources of edits as a request has them, of which all are masks."""
    assert all(edit["mask"] is True for edit in edits)
    every = ((at, name) for one in edits for at in one["sites"] for name in one["sources"])
    return tuple(sorted(every))


class Fake:
    """A server whose edits change.

    Attributes:
        masks: that are served.
        measured: those of every text that was asked for, in order.
        left: completions until it is gone, and changes nothing any more.
    """

    def __init__(self, left: int = 10**6) -> None:
        self.masks, self.measured, self.left = NOTHING, [], left
        self.changes, self.meddles, self.shift = 0, False, 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or "null")
        if not self.left:
            raise httpx.ConnectError("refused")
        if path == losses.EDITS:
            if request.method == "PUT":
                self.changes += 1
                self.masks = masks_of(body["edits"])
            given = [{"mask": True, "sites": [at], "sources": [name]} for at, name in self.masks]
            return httpx.Response(200, json={"edits": given, "version": f"v{self.changes}"})
        if path == "/v1/completions":
            self.left -= 1
            assert body["prompt_logprobs"] == 0 and len(body["prompt"]) <= losses.BATCH
            self.measured += [(text, self.masks) for text in body["prompt"]]
            choices = [{"prompt_logprobs": self.rows(text)} for text in body["prompt"]]
            version = "another" if self.meddles and self.masks else f"v{self.changes}"
            return httpx.Response(200, json={"choices": choices, "weight_versions": [version]})
        assert path == "/v1/attn_res/trace"
        head = trace_answer.without_sites("demo", [0], 1, [0], ["a"])
        traced = [
            TracedSite.model_validate(
                trace_answer.traced_site(site, *2 * [bytes(4 * site.num_sources)], 1)
            ).model_dump()
            for site in SITES
        ]
        return httpx.Response(200, json=head | {"sites": traced})

    def rows(self, text: str) -> list:
        """Logprobs of a text's tokens as vLLM has them, of which the first has none."""
        count = len(text.split()) - 1
        each = (nats(text, self.masks) + count * self.shift) / max(count, 1)
        return [None, *[{"7": {"logprob": -each, "rank": 1}}] * count]


@pytest.fixture
def ask_fake(monkeypatch):
    """Let a fake server be asked by the command."""
    client = httpx.Client

    def use(fake: Fake) -> Fake:
        transport = httpx.MockTransport(fake)
        monkeypatch.setattr(httpx, "Client", lambda: client(transport=transport))
        monkeypatch.setattr(httpx, "request", client(transport=transport).request)
        return fake

    return use


@pytest.fixture
def asked(tmp_path) -> list[str]:
    """The words of a request for ``map.json`` by texts in ``texts.jsonl``."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return ["--url", "http://x", "--data", str(data), "--importance", str(tmp_path / "map.json")]


# --- numbers


def test_a_text_is_a_pair_with_itself():
    """Texts that differ much and change alike have no error, whatever they cost."""
    tokens, unedited = np.full(50, 8), np.linspace(1, 900, 50)
    assert increase(unedited + 4, unedited, tokens) == pytest.approx((0.5, 0))
    one = increase(np.array([9.0]), np.array([5.0]), np.array([8]))
    assert one == (0.5, None)


def test_standard_errors_are_those_of_drawn_texts():
    """Of many samples of texts, the increases scatter by as much as the error of one says."""
    generator = np.random.default_rng(0)

    def sample() -> tuple[float, float]:
        tokens = generator.integers(5, 200, 100)
        unedited = generator.normal(3, 1, 100) * tokens
        own = generator.normal(0.2, 0.3, 100)  # of each text, in nats per token
        return increase(unedited + own * tokens, unedited, tokens)

    found = np.array([sample() for _ in range(2000)])
    # 2000 samples give their deviation to 1.6 %; the formula is one for many texts.
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.06)
    tokens = np.full(30, 7)
    pairs = generator.normal(size=30)
    textbook = pairs.std(ddof=1) / math.sqrt(30) / 7
    assert increase(pairs, np.zeros(30), tokens)[1] == pytest.approx(textbook)


# --- files


def expected(mask: tuple[int, str]) -> tuple[float, float]:
    masked = np.array([nats(text, (mask,)) for text in TEXTS])
    return increase(masked, np.array([nats(text, NOTHING) for text in TEXTS]), TOKENS)


def test_a_map_has_the_measured_losses(ask_fake, asked, capsys, tmp_path, monkeypatch):
    """Each mask once, by all texts, in requests of some of them."""
    monkeypatch.setattr(losses, "BATCH", 4)
    fake, path = ask_fake(Fake()), tmp_path / "map.json"
    assert inspect(capsys, *asked) == f"{path}\n"
    alone = [NOTHING, *((mask,) for mask in MASKS)]
    assert set(fake.measured) == {(text, masks) for text in TEXTS for masks in alone}
    assert fake.masks == NOTHING  # as before
    found = json.loads(path.read_text())
    assert (found["model"], found["texts"], found["tokens"]) == ("demo", 10, TOKENS.sum())
    assert found["loss"] == pytest.approx(sum(nats(t, NOTHING) for t in TEXTS) / TOKENS.sum())
    assert [(row["site"], row["source"]) for row in found["masks"]] == MASKS
    for row in found["masks"]:
        own = expected((row["site"], row["source"]))
        assert (row["increase"], row["standard_error"]) == pytest.approx(own)
        (site,) = [site for site in SITES if site.index == row["site"]]
        assert (row["layer"], row["kind"]) == (site.layer, site.kind)


def test_a_table_has_the_same_numbers(ask_fake, asked, capsys, tmp_path):
    fake, table = ask_fake(Fake()), tmp_path / "map.csv"
    inspect(capsys, *asked)
    before = len(fake.measured)
    inspect(capsys, *asked[:-1], str(table), "--resume")  # its losses are there
    assert len(fake.measured) == before + len(TEXTS)  # the unedited model alone
    with table.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    wanted = json.loads((tmp_path / "map.json").read_text())["masks"]
    assert rows[-1]["layer"] == ""
    for row, own in zip(rows, wanted, strict=True):
        for name, value in own.items():
            if isinstance(value, float):
                assert float(row[name]) == pytest.approx(value, abs=1e-9)
            else:
                assert row[name] == ("" if value is None else str(value))


def test_a_figure_has_the_same_numbers(ask_fake, asked, capsys, tmp_path, monkeypatch):
    ask_fake(Fake())
    drawn = []

    def keep(file, draw, width) -> None:
        drawn.append(draw(width))
        file.write_bytes(b"a picture")

    monkeypatch.setattr(figure, "write", keep)
    path = tmp_path / "map.png"
    assert inspect(capsys, *asked[:-1], str(path), "--width", "4") == f"{path}\n"
    (panel, *_) = drawn[0].axes
    table = panel.images[0].get_array().filled(np.nan)
    for row, site in zip(table, SITES, strict=True):
        masks = [(site.index, name) for name in site.sources]
        own = [expected(mask)[0] for mask in masks if mask in MASKS]
        np.testing.assert_allclose(row[: len(own)], own)
        assert np.isnan(row[len(own) :]).all()
    assert panel.images[0].norm.vmax == pytest.approx(max(abs(expected(m)[0]) for m in MASKS))


@pytest.mark.parametrize("left", [0, 1, 3, 9])
def test_an_interruption_goes_on(left, ask_fake, asked, capsys, tmp_path):
    """Also where a line was cut short, and the server was left with a mask."""
    gone = ask_fake(Fake(left))
    assert "cannot be asked" in refused(capsys, *asked)
    kept = tmp_path / "map.losses.jsonl"
    if left > 1:
        content = kept.read_text()
        kept.write_text(content[:-9])
        assert "exist already; name a new file, or give --resume" in refused(capsys, *asked)
    fake = ask_fake(Fake())
    fake.masks = gone.masks if left > 2 else NOTHING
    assert bool(fake.masks) == (left > 2)
    inspect(capsys, *asked, "--resume")
    again = [masks for text, masks in fake.measured if text == TEXTS[0]]
    assert again.count(NOTHING) == 1 + (left < 3)  # as a check, beside what is missing
    masked = [masks for masks in again if masks]
    assert masked == [(mask,) for mask in MASKS][max(left - 3, 0) :]
    for row in json.loads((tmp_path / "map.json").read_text())["masks"]:
        own = expected((row["site"], row["source"]))
        assert (row["increase"], row["standard_error"]) == pytest.approx(own)


def test_losses_of_another_model_are_not_gone_on_with(ask_fake, asked, capsys):
    ask_fake(Fake())
    inspect(capsys, *asked, "--resume")
    ask_fake(Fake()).shift = 0.02
    assert "is of other weights or flags; remove it" in refused(capsys, *asked, "--resume")


def test_losses_of_other_texts_are_measured(ask_fake, asked, capsys, tmp_path):
    fake = ask_fake(Fake())
    inspect(capsys, *asked, "--resume")
    before = len(fake.measured)
    (tmp_path / "texts.jsonl").write_text('{"text": "some others"}\n')
    inspect(capsys, *asked, "--resume")
    assert len(fake.measured) == before + 2 + len(MASKS)
    rows = json.loads((tmp_path / "map.json").read_text())["masks"]
    assert {row["standard_error"] for row in rows} == {None}


def test_no_other_client_changes_edits_meanwhile(ask_fake, asked, capsys):
    ask_fake(Fake()).meddles = True
    assert "another client changed the weights or edits" in refused(capsys, *asked)


def test_a_server_with_edits_keeps_them(ask_fake, asked, capsys):
    fake = ask_fake(Fake())
    fake.masks = (MASKS[0],)
    assert "the server has edits" in refused(capsys, *asked)
    assert fake.masks == (MASKS[0],) and not fake.measured


def test_a_text_of_one_token_has_no_loss(ask_fake, capsys, tmp_path):
    ask_fake(Fake())
    words = ["--url", "http://x", "--prompt", "a", "--importance", str(tmp_path / "map.json")]
    assert "one token; give longer texts" in refused(capsys, *words)


def test_a_map_that_cannot_be_written(ask_fake, asked, capsys, tmp_path):
    fake = ask_fake(Fake())
    (tmp_path / "map.json").mkdir()
    assert "cannot be written" in refused(capsys, *asked, "--resume")
    assert fake.masks == NOTHING


# --- a choice


@pytest.mark.parametrize("limit", [0.02, 0.25, 9])
def test_masks_are_chosen_by_half_of_the_texts(limit, ask_fake, asked, capsys):
    """The cheapest first, as long as all of them cost less; never every source of a site."""
    fake = ask_fake(Fake())
    _, head, *costs = inspect(capsys, *asked, "--prune", str(limit)).splitlines()
    costs, edits = costs[:2], costs[2:]

    def of(masks: list, half: slice) -> float:
        more = sum(nats(t, tuple(masks)) - nats(t, NOTHING) for t in TEXTS[half])
        return more / TOKENS[half].sum()

    even, odd = slice(0, None, 2), slice(1, None, 2)
    wanted: list = []
    for mask in sorted(MASKS, key=lambda mask: of([mask], even)):
        (site,) = [site for site in SITES if site.index == mask[0]]
        rest = set(site.sources) - {name for at, name in [*wanted, mask] if at == mask[0]}
        if of([mask], even) < limit and rest and of([*wanted, mask], even) < limit:
            wanted.append(mask)
    flags = [shlex.split(line) for line in edits]
    assert {flag for flag, _ in flags} == {"--edit"}
    read = [edit_text.read(text) for _, text in flags]
    found = [(at, name) for edit in read for at in edit.sites for name in edit.sources]
    assert sorted(found) == sorted(wanted) and 0 < len(wanted) < len(MASKS)
    assert head == f"{len(wanted)} of {len(MASKS)} masks cost less than {limit:g} nats per token:"
    said = [float(line.split()[0]) for line in costs]
    assert said == pytest.approx([of(wanted, even), of(wanted, odd)], abs=6e-5)  # rounded
    assert abs(said[0] - said[1]) > 1e-3  # the halves differ
    assert fake.masks == NOTHING


# --- what is refused


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--importance", "m.txt"], "--importance is m.txt; expected a name that ends with one of"),
        (["--importance", "nowhere/m.json"], "--importance: nowhere is not a folder"),
        (["--importance", "m.json", "--from", "x.json"], "--from does not go with --importance"),
        (["--importance", "m.json", "--edit", "mask"], "--edit does not go with --importance"),
        (["--importance", "m.json", "--max-tokens", "2"], "--max-tokens does not go with"),
        (["--importance", "m.json", "--token", "2"], "--token does not go with --importance"),
        (["--importance", "m.json", "--out", "x.png"], "--out does not go with --importance"),
        (["--importance", "m.json", "--data", "x.jsonl"], "--prompt does not go with --data"),
        (["--importance", "m.json"], "give a checkpoint right after `inspect`"),
        ([str(DEMO), "--importance", "m.json", "--uds", "x"], "--uds is for a server that others"),
        (["--url", "http://127.0.0.1:1", "--importance", "m.json"], "cannot be asked"),
        (["--url", "http://x", "--importance", "m.json", "--prune", "1"], "--prune needs 4 texts"),
        (["--url", "http://x", "--prune", "1"], "are for --importance; give that too"),
        (["--url", "http://x", "--data", "x.jsonl"], "are for --importance; give that too"),
        (["--url", "http://x", "--resume"], "are for --importance; give that too"),
    ],
)
def test_a_map_that_is_refused(words, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words, "--prompt", "import os")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    ["", "import os\n", '{"txt": "a"}\n', '{"text": ""}\n', '"a"\n', '{"text": 3}\n', None],
)
def test_data_without_texts(content, capsys, tmp_path):
    data = tmp_path / "texts.jsonl"
    if content is not None:
        data.write_text(content)
    words = ["--url", "http://x", "--data", str(data), "--importance", str(tmp_path / "m.json")]
    assert f"--data: {data} has no texts" in refused(capsys, *words)


@pytest.mark.parametrize("left", ["map.json", "map.losses.jsonl"])
def test_a_file_is_not_written_over(left, asked, capsys, tmp_path):
    (tmp_path / left).write_text("")
    said = refused(capsys, *asked)
    assert said.endswith("or its losses exist already; name a new file, or give --resume.")
    assert not (tmp_path / left).read_text()
