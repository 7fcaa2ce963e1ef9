"""``convert --edit``: what it writes is the float64 model of the source under the same edits."""

import random

import pytest
import torch
from checkpoints import (
    EVERY_OPTION,
    GOLDENS,
    config_of,
    edit,
    write_baseline,
    write_house,
    write_nanogpt,
)
from edited_oracle import evaluate, of_a_model, static
from jobs import fresh_prompts
from safetensors.torch import load_file

from attnres_serve import cli
from attnres_serve.checkpoints.check import check, describe, render
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.depth import edit_text
from attnres_serve.depth.edits import Edit
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.verify import oracle

LENGTH = 12
MADE = {
    "house": lambda folder: write_house(folder, "qwen3", layers=3, block_size=2),
    "fla": lambda folder: GOLDENS / "fla_transformer_block",
    "nanogpt": lambda folder: write_nanogpt(folder),
    "cumulative": lambda folder: write_baseline(folder, size=3, layers=3),
    "shared": lambda folder: write_house(
        folder, "qwen3", layers=4, block_starts=[0, 1, 5], attn_res=EVERY_OPTION
    ),
    "recency": lambda folder: write_house(
        folder, layers=3, block_size=3, attn_res={"recency_bias": True}
    ),
}
# Queries of B are float32 where A's are multiplied: a rounding of 2^-24 of a logit of some tens,
# through a dozen sublayers.
NEAR = 1e-4
MASK = 'mask sites=3 sources="embedding"'


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MADE)
def test_every_kind_of_edit(name, seed, tmp_path):
    random.seed(f"{name} {seed}")
    source = MADE[name](tmp_path / "a")
    model = oracle.load(source)
    (ids,) = fresh_prompts((LENGTH,))
    edits = static(model, LENGTH)
    words = [edit_text.write(Edit.model_validate(of_a_model(edit))) for edit in edits]
    convert(str(source), str(tmp_path / "b"), edits=words)
    *_, expected = evaluate(model, ids, edits)
    actual = oracle.load(tmp_path / "b")
    torch.testing.assert_close(actual.logprobs(ids), expected, atol=NEAR, rtol=0)
    facts = describe(check_folder(tmp_path / "b"))
    assert facts["edits"] == words and words[-1] in render(facts)
    stored = load_file(next((tmp_path / "b").glob("*.safetensors")))
    biases = [x for name, x in stored.items() if name.endswith("_res_bias")]
    assert len(biases) == len({*range(actual.spec.final + actual.spec.final_mix)})
    assert {x.dtype for x in biases} == {torch.float32}


def test_edits_of_a_model_with_edits(tmp_path, sentence):
    """They follow those that it has, and are listed behind them."""
    source = MADE["recency"](tmp_path / "a")
    convert(str(source), str(tmp_path / "b"), edits=[MASK, "scale=0.5"])
    convert(str(tmp_path / "b"), str(tmp_path / "c"), edits=["scale=-2", "mean sites=4"])
    convert(str(source), str(tmp_path / "d"), edits=[MASK, "scale=0.5", "scale=-2", "mean sites=4"])
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "cd")
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    configs = [config_of(tmp_path / name) for name in "cd"]
    assert configs[0] == configs[1] and len(configs[0]["attn_res"]["edits"]) == 4
    places = str(tmp_path / "b"), str(tmp_path / "e")
    sentence.raises(SettingError, convert, *places, edits=["mask sites=3 sources='block 1'"])
    assert not (tmp_path / "e").exists()


def test_a_shared_query_is_edited_at_one_site(tmp_path):
    """The others keep what they shared; the bias is a part of the logits that are scaled."""
    source = MADE["shared"](tmp_path / "a")
    convert(str(source), str(tmp_path / "b"), edits=["scale=0.5 sites=1"])
    before = load_file(next(source.glob("*.safetensors")))
    after = load_file(tmp_path / "b" / "model.safetensors")
    shared, bias = (before[f"model.layers.0.mlp_res_{part}"] for part in ("proj.weight", "bias"))
    expected = {"layers.0.mlp": 0.5, "layers.1.self_attention": 1.0, "layers.1.mlp": 1.0}
    for site, factor in expected.items():  # of the block that begins with the first MLP
        assert after[f"model.{site}_res_proj.weight"].equal(shared.float() * factor)
        assert after[f"model.{site}_res_bias"][-1] == bias.float() * factor
        assert not after[f"model.{site}_res_bias"][:-1].any()


@pytest.mark.parametrize(
    "words",
    ["mean tokens=3", "scale=2 sources=embedding", "mask sites=77 sources=embedding", "drop"],
)
def test_an_edit_that_is_refused(words, tmp_path, sentence):
    source = MADE["house"](tmp_path / "a")
    sentence.raises(SettingError, convert, str(source), str(tmp_path / "b"), edits=[words])
    assert not (tmp_path / "b").exists()


def test_a_config_whose_edits_are_none(tmp_path, sentence):
    source = MADE["house"](tmp_path / "a")
    edit(source, attn_res=config_of(source)["attn_res"] | {"edits": [{"ban": 3}]})
    sentence.raises(CheckpointError, check_folder, source)


def test_the_command(tmp_path, capsys):
    source = MADE["house"](tmp_path / "a")
    assert cli.main(["convert", str(source), str(tmp_path / "b"), "--edit", MASK]) == 0
    check(str(tmp_path / "b"), as_json=False)
    assert "edited        mask sites=3 sources=embedding" in capsys.readouterr().out
