"""``inspect --against``: two texts or checkpoints and their difference, and what is refused."""

import argparse
import csv
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_fla
from refusals import refused
from serving import DEMO, GOLDENS, run_module

from attnres_serve import cli
from attnres_serve.checkpoints import tokenizer
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.inspect import compare, difference, figure, numbers, text_figure
from attnres_serve.inspect.rows import SiteRow, rows_of
from attnres_serve.inspect.statistics import Statistics, Summary
from attnres_serve.inspect.token_classes import CLASSES


def rows(layers: int = 6, block: int = 4, **options) -> list[SiteRow]:
    return rows_of(sites(AttnResSpec.uniform(Layout.of(layers), block, 1e-6, **options)))


def summary(seed: int, tokens: int = 40) -> Summary:
    draw = np.random.default_rng(seed)
    found = Statistics(rows())
    weights = [draw.dirichlet(np.ones(len(row.sources)), tokens) for row in rows()]
    classes = draw.integers(0, len(CLASSES) - seed, tokens)
    found.add([own.astype(np.float32) for own in weights], classes)
    return found.summary("demo")


FIRST, SECOND = summary(0), summary(1, 30)  # the second has no punctuation


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (rows(7), "13 sites mix in a and 15 in b"),
        (rows(final_mix=False), "13 sites mix in a and 12 in b"),
        (
            rows(block=3),
            "site 3 is mlp 1 with 2 sources, the last one partial, in a, and mlp 1 with 2 sources, "
            "the last one block 1, in b",
        ),
    ],
)
def test_other_sites_or_sources_are_refused(other, said):
    with pytest.raises(SettingError, match="expected two checkpoints with the same sites and"):
        difference.require_same(("a", "b"), (rows(), other))
    with pytest.raises(SettingError, match=said):
        difference.require_same(("a", "b"), (rows(), other))
    difference.require_same(("a", "b"), (rows(), rows()))


def test_numbers_of_both_kinds(tmp_path, capsys):
    """Those of both, and the second mean less the first; nothing where one has no such token."""
    for name in ("x.csv", "x.npz"):
        paths = numbers.outputs(str(tmp_path / name), None)
        tables = difference.table(FIRST, SECOND), difference.arrays(FIRST, SECOND)
        numbers.write(paths, None, *tables)
    arrays = np.load(tmp_path / "x.npz")
    for which, own in (("first", FIRST), ("second", SECOND)):
        for name in difference.NUMBERS:
            np.testing.assert_array_equal(arrays[f"{which}_{name}"], getattr(own, name))
    change = arrays["difference"]
    np.testing.assert_array_equal(change, SECOND.mean - FIRST.mean)
    assert np.isnan(change[-1]).all() and not np.isnan(change[0, 0, 0])
    with (tmp_path / "x.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    names = list(FIRST.classes)
    for line in table:
        at = names.index(line["tokens of"]), int(line["site"])
        source = rows()[at[1]].sources.index(line["source"])
        assert float(line["difference"] or "nan") == pytest.approx(change[*at, source], nan_ok=True)
        assert int(line["second tokens"]) == SECOND.tokens[at[0]]
        assert float(line["first low"]) == pytest.approx(FIRST.low[*at, source])


def test_the_figure():
    """Both means in the colours of weights, and the difference on one scale around zero."""
    drawn = text_figure.draw_difference((FIRST, SECOND), ("first: a", "second: b"))
    panels = {axes.get_title(): axes.images[0] for axes in drawn.axes if axes.images}
    assert list(panels) == ["first: a\n40 tokens", "second: b\n30 tokens", "second less first"]
    change = SECOND.mean[0] - FIRST.mean[0]
    wanted = FIRST.mean[0], SECOND.mean[0], change
    for image, table in zip(panels.values(), wanted, strict=True):
        np.testing.assert_array_equal(image.get_array().filled(np.nan), table)
    limits = [image.get_clim() for image in panels.values()]
    most = np.nanmax(np.abs(change))
    assert limits == [(0, 1), (0, 1), (-most, most)]
    assert all(isinstance(axes, figure.Axes) for axes in drawn.axes)


@pytest.mark.parametrize(
    ("checkpoints", "sources", "titles"),
    [
        (("x/a", "x/b"), ("t", "t"), ("first: a", "second: b")),
        (("a/x", "b/x"), ("t", "t"), ("first: a/x", "second: b/x")),
        (("a", "a"), ("d/t", "d/u"), ("first: t", "second: u")),
        (("a", "b"), ("t", "u"), ("first: a: t", "second: b: u")),
        (("a", "a"), ("en/t", "de/t"), ("first: en/t", "second: de/t")),
    ],
)
def test_titles_tell_what_differs(checkpoints, sources, titles):
    texts = [compare._file("--text", source) for source in sources]
    assert compare._titles(checkpoints, texts) == titles


@pytest.mark.parametrize("more", [("x", "y"), ("", "y"), ("x" * 99, "x" * 98)])
def test_titles_tell_prompts_apart(more):
    """Also where they differ far from their beginning."""
    alike = "once upon a time there was a king"
    titles = compare._titles(("a", "a"), [compare._prompt(alike + end) for end in more])
    assert titles[0] != titles[1]
    assert all("“…" in title and len(title) < 40 for title in titles)
    short = compare._titles(("a", "a"), [compare._prompt("a"), compare._prompt(alike)])
    assert short == ("first: “a”", "second: “once upon a time there …”")


def test_a_name_of_the_users_own_is_in_titles(monkeypatch, tmp_path):
    """It is the first checkpoint's."""
    folders = [str(write_fla(tmp_path / name, seed=ord(name))) for name in "ab"]
    seen = []

    def summaries(name: str, model, texts, flags) -> list[Summary]:
        seen.append(name)
        return [FIRST, SECOND][: len(texts)]

    monkeypatch.setattr("attnres_serve.inspect.text.summaries", summaries)
    monkeypatch.setattr(
        "attnres_serve.inspect.text_figure.write_difference",
        lambda found, titles, path: seen.append(titles),
    )
    words = ["--prompt", "a", "--served-model-name", "demo", "--out", str(tmp_path / "x.png")]
    assert cli.main(["inspect", folders[0], *words, "--against", folders[1]]) == 0
    assert cli.main(["inspect", folders[0], *words, "--against-prompt", "b"]) == 0
    assert seen == [
        *("demo", folders[1], ("first: demo", "second: b")),
        *("demo", ("first: “a”", "second: “b”")),
    ]


def given(**options) -> argparse.Namespace:
    names = ("text", "prompt", "prompt_file", "against_text", "against_prompt")
    return argparse.Namespace(**dict.fromkeys(names) | options)


def test_texts(tmp_path):
    (tmp_path / "t").write_text("of a file")
    path = str(tmp_path / "t")
    for options, wanted in (
        ({"text": path}, ("of a file", "of a file")),
        ({"prompt": "a"}, ("a", "a")),
        ({"prompt": "a", "against_prompt": "b"}, ("a", "b")),
        ({"prompt_file": path, "against_prompt": "b"}, ("of a file", "b")),
        ({"prompt": "a", "against_text": path}, ("a", "of a file")),
        ({"prompt": path, "against_text": path}, (path, "of a file")),
    ):
        found = compare._texts(given(**options))
        assert tuple("".join(one.parts()) for one in found) == wanted
        assert compare._differ(found) == (wanted[0] != wanted[1])


def test_the_second_prompt_of_stdin(monkeypatch, tmp_path):
    (tmp_path / "p").write_text("of stdin")
    with (tmp_path / "p").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        _, second = compare._texts(given(prompt="a", against_prompt="-"))
    assert [*second.parts()] == ["of stdin"]


# What is refused.


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--against", "x", "--text", "t"], "give a checkpoint right after `inspect`"),
        ([str(DEMO), "--against", "x"], "give the first text by --text FILE, --prompt TEXT or --"),
        ([str(DEMO), "--against-text", "x"], "give the first text by --text FILE"),
        ([str(DEMO), "--against", "x", "--text", "t", "--prompt", "a"], "one of them"),
        ([str(DEMO), "--against-text", "t", "--against-prompt", "b", "--text", "u"], "one of them"),
        ([str(DEMO), "--against-prompt", "", "--prompt", "a"], "--against-prompt is empty"),
        ([str(DEMO), "--against-text", "-", "--text", "-"], "can be read once"),
        ([str(DEMO), "--against", "x", "--text", "-"], "can be read once"),
        ([str(DEMO), "--against-prompt", "-", "--prompt", "-"], "can be read once"),
        ([str(DEMO), "--against-prompt", "-", "--prompt-file", "-"], "can be read once"),
        (
            [str(DEMO), "--against-prompt", "\udce9", "--prompt", "a"],
            "in --against-prompt is not in",
        ),
        ([str(DEMO), "--against", str(DEMO), "--prompt", "a"], "both sides are the same"),
        ([str(DEMO), "--against-prompt", "a", "--prompt", "a"], "both sides are the same"),
        ([str(DEMO), "--against", "x", "--prompt", "a", "--edit", "mean"], "--edit does not go"),
        (
            [str(DEMO), "--against-text", "t", "--prompt", "a", "--token", "0"],
            "with --against-text",
        ),
        ([str(DEMO), "--against", "no/such/one", "--prompt", "a"], "no/such/one does not exist"),
        (
            [str(DEMO), "--against", str(GOLDENS / "fla_transformer_block"), "--prompt", "a"],
            "17 sites mix in",
        ),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, "inspect", *words)


@pytest.mark.engine
def test_two_checkpoints(tmp_path):
    """Two engines, one after the other, against the float64 models piece by piece."""
    pytest.importorskip("vllm")
    from trace_cases import FAR, wanted

    from attnres_serve.verify import oracle

    folders = [write_fla(tmp_path / name, seed=ord(name)) for name in "ab"]
    text = "def push(self, items):\n    return 17 + items\n" * 2
    (tmp_path / "text").write_text(text)
    paths = tmp_path / "x.npz", tmp_path / "x.png"
    words = ["--text", str(tmp_path / "text"), "--against", str(folders[1])]
    words += ["--max-model-len", "32", "--dtype", "float32"]
    words += ["--numbers", str(paths[0]), "--out", str(paths[1])]
    said = run_module("attnres_serve", "inspect", str(folders[0]), *words, timeout=300)
    assert said.endswith(f"{paths[0]}\n{paths[1]}\n")
    found = np.load(paths[0])
    for folder, which in zip(folders, ("first", "second"), strict=True):
        model, words_of = oracle.load(folder), tokenizer.load(folder)
        ids = words_of.encode(text, add_special_tokens=False)
        before = words_of.encode("")
        room = 32 - len(before)
        cut = [before + ids[at : at + room] for at in range(0, len(ids), room)]
        assert found[f"{which}_tokens"][0] == sum(map(len, cut)) and len(cut) > 1
        each = [wanted(model, piece)[0] for piece in cut]
        for site, parts in enumerate(zip(*each, strict=True)):
            weights = np.concatenate(parts)
            mean = found[f"{which}_mean"][0, site, : weights.shape[1]]
            np.testing.assert_allclose(mean, weights.mean(0), atol=FAR)
            tenth = np.sort(weights, 0)[-(-len(weights) // 10) - 1]
            low = found[f"{which}_low"][0, site, : weights.shape[1]]
            np.testing.assert_allclose(low, tenth, atol=FAR, rtol=1 / 128)
    change = found["second_mean"] - found["first_mean"]
    np.testing.assert_array_equal(found["difference"], change)
    assert np.nanmax(np.abs(change)) > 10 * FAR
    assert Path(paths[1]).read_bytes().startswith(b"\x89PNG")
