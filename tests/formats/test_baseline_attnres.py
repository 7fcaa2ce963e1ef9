"""Llama with `baseline_mode`: what is read of it, its blocks, its tensors, what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GOLDENS, config_of, depth_attention, edit, write_baseline
from on_file import Sentence

from attnres_serve.checkpoints import checked
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.resolve import resolve
from attnres_serve.verify import oracle

GOLDEN = GOLDENS / "baseline_attnres"
CONFIG = config_of(GOLDEN)
IDS = [(7 * i * i + 3 * i + 5) % 320 for i in range(40)]


def parsed(without: tuple[str, ...] = (), **changes: Any) -> ParsedConfig:
    result = resolve(config_of(GOLDEN, **dict.fromkeys(without, ...) | changes))
    assert result is not None and result.format == "baseline_attnres"
    return result


@pytest.mark.parametrize(
    ("layers", "size", "starts"),
    [
        (4, 4, (0, 4, 8)),  # the last block ends with the model: a copy for the final site
        (5, 4, (0, 4, 8)),
        (4, 3, (0, 4, 8)),  # an odd size is rounded up to whole layers
        (4, 5, (0, 6)),
        (3, 1, (0, 2, 4, 6)),  # behind every layer
        (3, 2, (0, 2, 4, 6)),
        (3, 6, (0, 6)),
        (3, 7, (0,)),
        (3, 10**9, (0,)),
        (1, 1, (0, 2)),
        (13, None, (0, 12, 24)),  # 12 sublayers where nothing is stated
        (12, None, (0, 12, 24)),
    ],
)
def test_copies_are_taken_behind_layers(
    layers: int, size: int | None, starts: tuple[int, ...]
) -> None:
    changes = {"num_hidden_layers": layers} | ({} if size is None else {"attnres_block_size": size})
    without = ("attnres_block_size",) if size is None else ()
    expected = AttnResSpec(
        Layout.of(layers), starts, 1e-5, final_mix=True, cumulative=True, recency_bias=True
    )
    assert parsed(without, **changes).spec == expected


@pytest.mark.parametrize("key", ["baseline_mode", "residual_baseline"])
@pytest.mark.parametrize(
    "name",
    [
        *("attnres", "block_attnres", "block-attnres", "attention_residual", "attention-residual"),
        *(" AttnRes ", "BLOCK-ATTNRES", "Attention_Residual\n"),
    ],
)
def test_every_name_of_the_mode(key: str, name: str) -> None:
    assert parsed(("baseline_mode",), **{key: name}) == parsed()


def test_two_keys_that_agree() -> None:
    """By what they mean; null and empty say nothing."""
    for other in ("block-attnres", " ATTNRES", None, "", False, "none", "Null"):
        assert parsed(residual_baseline=other) == parsed()
        assert parsed(residual_baseline="attnres", baseline_mode=other) == parsed()


def test_values_as_its_code_reads_them() -> None:
    for size in ("4", 4.0, " 4 "):
        assert parsed(attnres_block_size=size) == parsed(attnres_block_size=4)
    assert parsed(attnres_block_size=None) == parsed(("attnres_block_size",))
    for flag in (None, 0, 1):
        assert parsed(use_qk_norm=flag) == parsed(use_qk_norm=bool(flag))
        assert parsed(scale_embeds=flag) == parsed(scale_embeds=bool(flag))


@pytest.mark.parametrize("older", [None, "", False, "none"])
def test_verify_reads_the_mode_alike(older: Any) -> None:
    tensors: list[str] = []
    expected = oracle.spec_of(CONFIG, tensors)
    config = CONFIG | {"baseline_mode": older, "residual_baseline": "attnres"}
    assert oracle.spec_of(config, tensors) == expected
    assert oracle.spec_of(CONFIG | {"residual_baseline": older}, tensors) == expected
    assert resolve(config) == parsed()


@pytest.mark.parametrize("name", ["AttnRes-3B", "AttnRes-410M"])
def test_configurations_of_its_repository(name: str) -> None:
    """As they are stated, and as its training code saves them."""
    config = depth_attention.CONFIGS[name]
    layers = config["num_hidden_layers"]
    starts, eps = tuple(range(0, 2 * layers + 1, 12)), config["rms_norm_eps"]
    spec = AttnResSpec(Layout.of(layers), starts, eps, cumulative=True, recency_bias=True)
    for result in (resolve(config), resolve(config | depth_attention.SAVED)):
        assert result is not None and (result.family, result.spec) == ("normed_llama", spec)
    saved = depth_attention.SAVED | {"attnres_block_size": CONFIG["attnres_block_size"]}
    assert parsed(**saved) == parsed()


@pytest.mark.parametrize(
    ("norms", "scaled", "base"),
    [
        (None, None, "normed_llama"),
        (True, False, "normed_llama"),
        (False, True, "normed_llama"),
        (False, False, "llama"),
        (False, None, "llama"),
    ],
)
def test_the_base(norms: bool | None, scaled: bool | None, base: str, tmp_path: Path) -> None:
    """Norms are usual and scaled embeddings are not; all of it survives in the house format."""
    options = {"use_qk_norm": norms, "scale_embeds": scaled}
    folder = write_baseline(tmp_path / "own", attention_bias=True, mlp_bias=True, **options)
    result = checked.check_folder(folder).translated("it")
    assert (result.family, result.qk_norm_eps) == (base, None)
    convert(str(folder), str(tmp_path / "house"), to_house=True)
    house = checked.check_folder(tmp_path / "house").translated("house")
    assert (house.family, house.spec) == (result.family, result.spec)
    own, converted = oracle.load(folder), oracle.load(tmp_path / "house")
    assert torch.equal(own.logprobs(IDS), converted.logprobs(IDS))


def test_norms_and_scales_change_the_answers(tmp_path: Path) -> None:
    """So that the agreement of other tests says something of them."""
    kinds = ({}, {"use_qk_norm": False}, {"use_qk_norm": True, "scale_embeds": True})
    normed, bare, scaled = (
        oracle.load(write_baseline(tmp_path / str(number), **options)).logprobs(IDS)
        for number, options in enumerate(kinds)
    )
    for one, other in ((normed, bare), (normed, scaled)):
        assert (one - other).abs().max() > 1e-2


def test_what_its_code_never_reads_is_left_aside_by_name(tmp_path: Path) -> None:
    """It may be missing; its values do not matter, and a converted checkpoint has it no more."""
    unread = "lm_head_layernorm.weight"
    folder = write_baseline(tmp_path / "own")
    assert unread in checked.check_folder(folder).headers
    convert(str(folder), str(tmp_path / "house"), to_house=True)
    assert unread not in checked.check_folder(tmp_path / "house").headers
    checked.check_folder(edit(folder, lambda tensors: tensors.pop(unread)))


REFUSED: dict[str, dict[str, Any]] = {
    "modes that disagree": {"residual_baseline": "plain"},
    "no sublayer": {"attnres_block_size": 0},
    "half a sublayer": {"attnres_block_size": 2.5},
    "a size in words": {"attnres_block_size": "four"},
    "a size of true": {"attnres_block_size": True},
    "norms": {"use_qk_norm": "no"},
    "scale": {"scale_embeds": "yes"},
    "another AttnRes key": {"attnres_num_heads": 4},
    "Depth-Attention": {"use_depth_attention": True},
    "another connection": {"dwa_dilation": 2},
    "a gelu": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(name: str, sentence: Sentence) -> None:
    sentence.raises(CheckpointError, resolve, CONFIG | REFUSED[name])


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("model.attnres_final_aggregator.recency_bias"),
        lambda t: t.pop(LAYER + "attnres_mlp_aggregator.pseudo_query"),
        lambda t: t.pop(LAYER + "self_attn.k_norm.weight"),
        lambda t: t.update({LAYER + "attnres_attn_aggregator.gate": torch.zeros(64)}),
        lambda t: t.update({LAYER + "attnres_mlp_aggregator.recency_bias": torch.zeros(64)}),
    ],
)
def test_tensors_that_are_refused(change: Any, tmp_path: Path, sentence: Sentence) -> None:
    folder = edit(shutil.copytree(GOLDEN, tmp_path / "checkpoint"), change)
    sentence.raises(CheckpointError, checked.check_folder, folder)
