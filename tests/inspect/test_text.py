"""``inspect --text``: statistics against numpy, classes of tokens, pieces, and what is refused."""

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from serving import DEMO, GOLDENS
from tqdm import tqdm

from attnres_serve.checkpoints import tokenizer
from attnres_serve.compat.token_texts import TokenTexts
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.inspect import figure, numbers, pieces, statistics, text, text_figure
from attnres_serve.inspect.pieces import Piece
from attnres_serve.inspect.rows import rows_of
from attnres_serve.inspect.statistics import PERCENTILES, Statistics, Summary
from attnres_serve.inspect.token_classes import CLASSES, Classes, class_of

ROWS = rows_of(sites(AttnResSpec.uniform(Layout.of(6), 4, 1e-6)))
CLOSE = 1 / 128  # of a quantile: half a step of 64 to a power of two


def order_statistic(values: np.ndarray, percent: int) -> np.ndarray:
    """The least value that so many percent of the tokens do not exceed."""
    return np.sort(values, axis=0)[-(-len(values) * percent // 100) - 1]


def check(found: Summary, weights: list[np.ndarray], classes: np.ndarray) -> None:
    """All numbers of a summary, against numpy over all tokens at once."""
    assert found.classes == ("all", *CLASSES)
    for kind in range(len(found.classes)):
        members = classes == kind - 1 if kind else np.full(len(classes), True)
        assert found.tokens[kind] == members.sum()
        for site, own in enumerate(weights):
            chosen, width = own[members].astype(np.float64), own.shape[1]
            for part in (found.mean, found.low, found.high):
                assert np.isnan(part[kind, site, width:]).all()
                assert np.isnan(part[kind, site]).all() == (not members.any())
            if members.any():
                mean = found.mean[kind, site, :width]
                np.testing.assert_allclose(mean, chosen.mean(0), rtol=1e-12)
                for part, percent in zip((found.low, found.high), PERCENTILES, strict=True):
                    wanted = order_statistic(chosen, percent)
                    # Below the least bin, 2^-20, a quantile is 0.
                    np.testing.assert_allclose(
                        part[kind, site, :width], wanted, rtol=CLOSE, atol=2**-20
                    )


def drawn(tokens: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Weights of all sizes, zeros and ones among them, and classes."""
    draw = np.random.default_rng(seed)
    weights = [
        draw.dirichlet(np.full(len(row.sources), 0.2), tokens).astype(np.float32) for row in ROWS
    ]
    return weights, draw.integers(1, len(CLASSES), tokens)  # none is special


@pytest.mark.parametrize("sizes", [(1,), (30,), (7, 500, 1, 200)])
def test_statistics_equal_numpy(sizes):
    """However a text is cut: every class, also one that has no token."""
    weights, classes = drawn(sum(sizes))
    found = Statistics(ROWS)
    ends = list(itertools.accumulate(sizes))
    for begin, end in zip([0, *ends], ends, strict=False):
        found.add([own[begin:end] for own in weights], classes[begin:end])
    check(found.summary("demo"), weights, classes)


def test_bins():
    """Every bin is where its middle lies, and a weight at most half a step from it."""
    middles = statistics.middles()
    assert len(middles) == statistics.BINS and (np.diff(middles) > 0).all()
    found = statistics.bins(middles.astype(np.float32))
    np.testing.assert_array_equal(found, np.arange(statistics.BINS))
    values = np.geomspace(2**-20, 1, 10_001).astype(np.float32)
    np.testing.assert_allclose(middles[statistics.bins(values)], values, rtol=CLOSE)
    odd = np.array([0, 1e-30, 2**-20 * 0.999, 1.0000001, 1.5], np.float32)
    assert list(statistics.bins(odd)) == [0, 0, 0, statistics.BINS - 1, statistics.BINS - 1]


def test_numbers_of_both_kinds(tmp_path, capsys):
    """A row for each class, site and source, and arrays of the same."""
    weights, classes = drawn(50)
    collected = Statistics(ROWS)
    collected.add(weights, classes)
    found = collected.summary("demo")
    for name in ("x.csv", "x.npz"):
        paths = numbers.outputs(str(tmp_path / name), None)
        numbers.write(paths, None, statistics.table(found), statistics.arrays(found))
    with (tmp_path / "x.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    arrays = np.load(tmp_path / "x.npz")
    assert len(table) == len(found.classes) * sum(len(row.sources) for row in ROWS)
    where = {name: at for at, name in enumerate(arrays["class"])}
    assert list(where) == list(found.classes)
    for line in table:
        kind, site = where[line["tokens of"]], int(line["site"])
        source = ROWS[site].sources.index(line["source"])
        assert arrays["source"][site, source] == line["source"]
        assert int(line["tokens"]) == arrays["tokens"][kind] == found.tokens[kind]
        assert (line["layer"] or "-1", line["kind"]) == (
            str(arrays["layer"][site]),
            arrays["kind"][site],
        )
        for name in ("mean", "low", "high"):
            value, wanted = line[name], getattr(found, name)[kind, site, source]
            assert arrays[name][kind, site, source] == pytest.approx(wanted, nan_ok=True)
            assert value == "" if np.isnan(wanted) else float(value) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("own", "before", "name"),
    [
        (" \n", "", "whitespace"),
        ("", "a", "whitespace"),
        (" word", "a", "word start"),
        ("word", "", "word start"),
        ("word", "\n", "word start"),
        ("ing", "read", "word continuation"),
        ("name", "a_", "word start"),
        ("(self", "push", "word start"),
        ("'t", "don", "word continuation"),
        ("t", "on'", "word continuation"),
        ("t", " '", "word start"),
        ("nd", "2", "word continuation"),
        ("2nd", " ", "word continuation"),
        ("語", "日", "word continuation"),
        ("\ufffd", " ", "word start"),
        ("12", "a", "number"),
        (" 3.14", "", "number"),
        ("):", "a", "punctuation"),
        (" +=", "a", "punctuation"),
    ],
)
def test_classes(own, before, name):
    assert CLASSES[class_of(own, before)] == name


def test_classes_of_the_demo():
    words = tokenizer.load(DEMO)
    ids = words.encode("def don't(x2, 17):\n    return None")
    classes = Classes(words)
    assert "".join(TokenTexts(words).of(ids[1:])) == "def don't(x2, 17):\n    return None"
    found = [CLASSES[kind] for kind in classes.of(ids)]
    assert found[:2] == ["special", "word start"] and set(found) == {*CLASSES}


class Spaced:
    """A tokenizer that, as SentencePiece's, decodes a first token without the space before it."""

    all_special_ids = (0,)
    texts = ("<s>", "a", " b", "c")

    def encode(self, text: str, **_) -> list[int]:
        return [1]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[token] for token in ids).lstrip()


def test_a_space_that_a_first_token_loses():
    found = Classes(Spaced()).of([0, 1, 2, 3])
    assert [CLASSES[kind] for kind in found] == [
        "special",
        "word start",
        "word start",
        "word continuation",
    ]


def test_pieces(tmp_path, monkeypatch):
    """Special tokens around each, classes as of the whole text, and no token left out."""
    words = tokenizer.load(DEMO)
    whole = (DEMO / "config.json").read_text() * 3
    (tmp_path / "text").write_text(whole)
    monkeypatch.setattr(pieces, "CHARACTERS", 700)
    parts = list(pieces.parts_of_file("--text", str(tmp_path / "text")))
    assert "".join(parts) == whole and len(parts) > 2
    assert all(part.endswith("\n") and 700 <= len(part) < 800 for part in parts[:-1])
    found = list(pieces.pieces(words, parts, 16))
    each = [words.encode(part, add_special_tokens=False) for part in parts]
    (first,) = words.encode("")
    assert {piece.ids[0] for piece in found} == {first}
    assert [token for piece in found for token in piece.ids[1:]] == [*itertools.chain(*each)]
    assert {len(piece.ids) for piece in found[: len(each[0]) // 15]} == {16}
    classes = [kind for own in each for kind in Classes(words).of(own)]
    assert [kind for piece in found for kind in piece.classes[1:]] == classes
    assert {piece.classes[0] for piece in found} == {CLASSES.index("special")}


def test_the_figure(tmp_path):
    """Quantiles and mean of all tokens, and each class less the mean on one scale."""
    collected = Statistics(ROWS)
    weights, classes = drawn(80)
    collected.add(weights, np.where(classes == 2, 3, classes))  # no word start
    found = collected.summary("folder/demo")
    page = text_figure.draw(found)
    assert page.get_suptitle() == "demo: attention over depth of 80 tokens"
    images = {axes.get_title(): axes.images[0] for axes in page.findobj(figure.Axes) if axes.images}
    for title, wanted in (
        ("10 % of tokens are below", found.low[0]),
        ("mean", found.mean[0]),
        ("90 % of tokens are below", found.high[0]),
    ):
        np.testing.assert_array_equal(images.pop(title).get_array().filled(np.nan), wanted)
    there = {
        f"{name}\n{found.tokens[at]} tokens": found.mean[at] - found.mean[0]
        for at, name in enumerate(found.classes)
        if name not in ("all", "special", "word start")
    }
    for title, wanted in there.items():
        np.testing.assert_array_equal(images[title].get_array().filled(np.nan), wanted)
    most = max(np.nanmax(np.abs(wanted)) for wanted in there.values())
    assert {images[title].get_clim() for title in there} == {(-most, most)}
    assert len(there) == 4
    for name in ("a.svg", "b.svg"):
        text_figure.write(found, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# What is refused.


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--text", "t"], "give a checkpoint right after `inspect`"),
        ([str(DEMO), "--text", "nowhere.txt"], "--text: nowhere.txt cannot be read"),
        ([str(DEMO), "--text", "t", "--prompt", "a"], "--prompt does not go with --text"),
        ([str(DEMO), "--text", "t", "--edit", "mean"], "--edit does not go with --text"),
        (["--text", "t", "--url", "http://x"], "--url does not go with --text"),
        ([str(DEMO), "--text", "t", "--model", "x"], "--model does not go with inspect"),
        ([str(DEMO), "--text", "t", "--out", "x.html"], "expected a name that ends with .png"),
        ([str(DEMO), "--text", "empty"], "--text: empty is empty"),
        ([str(DEMO), "--text", "latin"], "--text: latin is not in UTF-8"),
        ([str(DEMO), "--text", "t", "--max-model-len", "1"], "has no room beside"),
        ([str(DEMO), "--text", "t", "--max-model-len", "2048"], "has a context of 1024 tokens"),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").write_bytes(b"")
    Path("latin").write_bytes(b"\xff")
    Path("t").write_text("a text")
    assert sentence in refused(capsys, "inspect", *words)


def test_pieces_are_traced_one_by_one():
    """Against numpy on the weights of each piece, from the record of a trace."""
    pytest.importorskip("vllm")
    from in_process import world
    from trace_cases import FAR, record, wanted, worker_of
    from vllm.config import set_current_vllm_config

    from attnres_serve.model.config import spec_of
    from attnres_serve.verify import oracle
    from attnres_serve.worker import WorkerExtension

    golden = GOLDENS / "fla_transformer_block"
    found_pieces = [
        Piece(ids, [3] + [at % 5 + 1 for at in ids[1:]])
        for ids in ([5, *range(40, 66)], [5, *range(90, 100)], [5])
    ]
    with world(golden):
        worker = worker_of(golden, "two_phase", "cpp", 16)
        rows = rows_of(sites(spec_of(worker.vllm_config.model_config.hf_config)))

        def ask(name: str, args: tuple) -> list:
            with set_current_vllm_config(worker.vllm_config):
                return [getattr(WorkerExtension, name)(worker, *args)]

        engine = SimpleNamespace(collective_rpc=ask)
        with tqdm(disable=True) as bar:
            found = text.summary(engine, "golden", rows, found_pieces, bar)
        each = []
        for ids, _ in found_pieces:
            traces = record(worker, ids, range(len(ids)), [row.index for row in rows])
            each.append([traces[row.index].weights.numpy() for row in rows])
    weights = [np.concatenate(parts) for parts in zip(*each, strict=True)]
    classes = np.concatenate([piece.classes for piece in found_pieces])
    check(found, weights, classes)
    model = oracle.load(golden)
    of_model = [wanted(model, ids)[0] for ids, _ in found_pieces]
    for own, *parts in zip(weights, *of_model, strict=True):
        np.testing.assert_allclose(own, np.concatenate(parts), atol=FAR)
