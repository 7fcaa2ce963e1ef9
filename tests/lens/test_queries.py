"""``inspect --queries``: what sites have learned, against the raw safetensors of every format."""

import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from checkpoints import write_fla, write_house, write_standard
from refusals import refused
from safetensors.torch import load_file, save_file
from serving import DEMO, FAMILY_GOLDENS, GOLDENS

from attnres_serve import cli
from attnres_serve.lens import figure
from attnres_serve.tracing import queries
from attnres_serve.verify.oracle import names
from attnres_serve.verify.rewritten import alice_ai

# With the names of queries and key norms as the float64 models have them.
CASES = [
    (GOLDENS / "fla_transformer_block", names.FLA_NAMES),
    (GOLDENS / "nanogpt_block", names.NANOGPT_NAMES),
    (GOLDENS / "qwen3_attnres_full", names.DELTA_NAMES),
    (GOLDENS / "qwen3_attnres_cumulative_block", names.OPEN_NAMES),  # no final mix
    (GOLDENS / "baseline_attnres", names.BASELINE_NAMES),
    (FAMILY_GOLDENS / "kimi_linear", names.HOUSE_NAMES),
    (FAMILY_GOLDENS / "alice_ai", alice_ai.DEPTH_NAMES),
    (FAMILY_GOLDENS / "qwen3_next", names.HOUSE_NAMES),
    (DEMO, names.HOUSE_NAMES),
]


def raw(folder: Path, table: dict[str, str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Queries and key norms in the order of the sites; NaN for a tensor that is not there."""
    stored = load_file(folder / "model.safetensors")
    layers = 1 + max(int(found[1]) for name in stored if (found := re.search(r"\.(\d+)\.", name)))
    attention, mlp, *final = [
        (table[f"{kind}_query"], table[f"{kind}_key"])
        for kind in ("attention", "mlp", "final")
        if f"{kind}_query" in table
    ]
    each = [(layer, pair) for layer in range(layers) for pair in (attention, mlp)]
    pairs = [(query.format(layer), key.format(layer)) for layer, (query, key) in each]
    missing = np.full(stored[pairs[1][0]].numel(), np.nan)
    query, key = (
        [
            stored[pair[at]].double().flatten().numpy() if pair[at] in stored else missing
            for pair in [*pairs, *final]
        ]
        for at in (0, 1)
    )
    return query, key


@pytest.mark.parametrize(("folder", "names"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_equals_the_raw_tensors(folder, names, tmp_path, capsys):
    """The table, which is written instead of a figure: a row for each site."""
    path = tmp_path / "q.csv"
    assert cli.main(["inspect", str(folder), "--queries", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    table, (query, key) = pandas.read_csv(path), raw(folder, names)
    folded = np.stack([q * k for q, k in zip(query, key, strict=True)])
    lengths = np.linalg.norm(folded, axis=1)
    wanted = {
        "query": [np.sqrt(q @ q) for q in query],
        "key_norm": [np.sqrt((k**2).mean()) for k in key],
        "effective": lengths,
    }
    for name, values in wanted.items():
        np.testing.assert_allclose(table[name], values, rtol=1e-8)  # nine digits
    unit = folded / np.where(lengths > 0, lengths, np.nan)[:, None]  # of zeros, or not stored
    cosines = table[[f"cosine {site}" for site in range(len(query))]]
    np.testing.assert_allclose(cosines, unit @ unit.T, rtol=1e-8, atol=1e-12)
    assert table["site"].tolist() == list(range(len(query)))
    assert table["kind"].tolist() == (
        ["attention", "mlp"] * (len(query) // 2) + ["final"] * (len(query) % 2)
    )
    layers = [None if layer is pandas.NA else layer for layer in table["layer"].astype("Int64")]
    assert layers == [at // 2 for at in range(len(query) // 2 * 2)] + [None] * (len(query) % 2)


def test_recency_biases(tmp_path):
    folder, path = GOLDENS / "qwen3_attnres_cumulative_block", tmp_path / "q.csv"
    stored = load_file(folder / "model.safetensors")
    assert cli.main(["inspect", str(folder), "--queries", "--out", str(path)]) == 0
    table = pandas.read_csv(path)
    wanted = [
        stored[f"model.layers.{layer}.{'attn' if kind == 'attention' else 'mlp'}_res_bias"].item()
        for layer, kind in zip(table["layer"], table["kind"], strict=True)
    ]
    for row, bias in enumerate(wanted):
        of_row = table.filter(regex=r"^bias \d+$").iloc[row].dropna()
        np.testing.assert_allclose(of_row, [0] * (len(of_row) - 1) + [bias], rtol=1e-8)


def test_scale_and_shared_queries(tmp_path):
    """The logit scale is folded in, and sites that share a query have its cosine, 1."""
    spec = {"shared_queries": "layer", "logit_scale": 0.25}
    folder = write_house(tmp_path / "x", block_size=4, attn_res=spec)
    found = queries.read(str(folder))
    stored = load_file(tmp_path / "x" / "model.safetensors")
    for row, length in zip(found.sites, found.effective, strict=True):
        stem = "output_attn" if row.layer is None else f"layers.{row.layer}.self_attention"
        parts = (stored[f"model.{stem}_res_{part}.weight"].double() for part in ("proj", "norm"))
        query, key = (part.flatten() for part in parts)
        assert length == pytest.approx(0.25 * (query * key).norm().item(), rel=1e-12)
    np.testing.assert_allclose([found.cosine[2, 3], found.cosine[4, 5]], 1)
    assert abs(found.cosine[1, 2]) < 0.9


@pytest.mark.parametrize("width", [3.25, 6.75])
def test_the_figure(width, tmp_path, monkeypatch):
    """Cosines in their places, none for a query of zeros, and profiles by kind of site."""
    found = queries.read(str(DEMO))
    assert found.effective[0] == 0  # never trained, as site 0 reads one source alone
    figures, draw = [], figure.queries
    monkeypatch.setattr(
        figure, "queries", lambda *given: figures.append(draw(*given)) or figures[-1]
    )
    for name in ("a.svg", "b.svg"):
        words = ("--queries", "--width", str(width), "--out", str(tmp_path / name))
        assert cli.main(["inspect", str(DEMO), *words]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    drawn, _ = figures
    assert drawn.get_figwidth() == width
    assert drawn.get_suptitle() == "checkpoint: what the sites have learned"
    (image,) = drawn.axes[0].images
    shown = np.ma.masked_invalid(image.get_array())
    assert shown.mask[0].all() and shown.mask[:, 0].all() and shown.count() == 16 * 16
    np.testing.assert_array_equal(shown[1:, 1:], found.cosine[1:, 1:])
    assert drawn.legends[0].get_texts()[-1].get_text() == "none: a query of zeros, or no query"
    for axes, values in zip(drawn.axes[1:3], (found.effective, found.key_norm), strict=True):
        attention, mlp = (line for line in axes.lines if line.get_marker() in ("o", "s"))
        np.testing.assert_array_equal(attention.get_xdata(), values[0:16:2])
        np.testing.assert_array_equal(mlp.get_xdata(), values[1:16:2])
    names = [axes.get_xlabel() for axes in drawn.axes]
    assert names[:3] == ["layer", "length of the\neffective query", "rms of the\nkey norm"]
    assert drawn.axes[3].get_ylabel() == "cosine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--queries"], "give it right after `inspect`"),
        ([str(DEMO), "--queries", "--prompt", "a"], "--prompt does not go with --queries"),
        ([str(DEMO), "--queries", "--max-tokens", "1"], "--max-tokens does not go with --queries"),
        (["--queries", "--url", "http://x"], "--url does not go with --queries"),
        ([str(DEMO), "--queries", "--dtype", "half"], "--dtype is for a server"),
        ([str(DEMO), "--queries", "--out", "x.json"], "expected a name that ends with one of .png"),
        ([str(DEMO), "--queries", "--out", "no/x.csv"], "--out: no is not a folder"),
        ([str(DEMO), "--queries", "--out", "x.csv", "--width", "4"], "--width is 4; expected 2 to"),
        ([str(DEMO), "--prompt", "a", "--out", "x.csv"], "x.csv; expected a name that ends with"),
        (["no/such/folder", "--queries"], "no/such/folder does not exist"),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, "inspect", *words)


def test_a_model_that_has_none(tmp_path, capsys):
    plain = write_standard(tmp_path / "plain")
    assert "is not an AttnRes checkpoint" in refused(capsys, "inspect", str(plain), "--queries")
    twin = write_fla(tmp_path / "twin", block_size=None)
    said = refused(capsys, "inspect", str(twin), "--queries")
    assert "standard residuals: it has no queries" in said


def test_numbers_that_are_none(tmp_path, capsys):
    folder = write_house(tmp_path / "x", block_size=2)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp_res_proj.weight"].view(-1)[3] = float("nan")
    save_file(stored, folder / "model.safetensors")
    said = refused(capsys, "inspect", str(folder), "--queries")
    assert "the query of the MLP of layer 1, holds numbers that are not finite" in said
