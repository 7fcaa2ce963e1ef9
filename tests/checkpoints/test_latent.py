"""Checkpoints with latent attention: what is told of them, and what is left aside."""

from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import edit, write_house
from on_file import Sentence

from attnres_serve.checkpoints import needs
from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.compat import device, source
from attnres_serve.compat.device import Kind
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES

LATENT = [name for name, family in FAMILIES.items() if family.is_latent]
FURTHER = "num_nextn_predict_layers"


def written(folder: Path, base: str, **changes: Any) -> Path:
    return write_house(folder, base, block_size=3, layers=4, changes=changes)


@pytest.mark.parametrize("base", LATENT)
def test_one_row_a_token_is_cached(base: str, tmp_path: Path) -> None:
    """A latent of 512 channels and 64 rotated ones in bfloat16, in each layer of attention."""
    facts = describe(check_folder(written(tmp_path, base)))
    layers = {"kimi_linear": 1, "bailing_hybrid": 2}.get(base, 4)
    assert facts["kv_cache_bytes_per_token"] == layers * (512 + 64) * 2
    assert facts["head_size"] == 576


def test_a_dense_kimi_linear_has_no_idle_experts(tmp_path: Path) -> None:
    """And none of its keys need be stated."""
    keys = ("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size")
    dense = dict.fromkeys((*keys, "first_k_dense_replace", "routed_scaling_factor"))
    folder = written(tmp_path, "kimi_linear", **dense, mla_use_output_gate=True)
    facts = describe(check_folder(folder))
    assert facts["active_parameters"] == facts["parameters"]


@pytest.mark.parametrize(
    ("latents", "rotated", "on_gpu"),
    [
        (512, 64, True),
        (256, 64, True),
        (544, 32, True),
        (256, 32, False),
        (512, 32, False),
        (1024, 64, False),
    ],
)
def test_rows_that_a_device_does_not_compute(
    latents: int, rotated: int, on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of heads do not matter: 24 is none that vLLM's other attention has."""
    pytest.importorskip("vllm")
    row = {"kv_lora_rank": latents, "qk_rope_head_dim": rotated}
    parsed = check_folder(written(tmp_path, "deepseek_v3", qk_nope_head_dim=24, **row))
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    needs.check_heads("m", parsed.translated("m"))
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    if on_gpu:
        needs.check_heads("m", parsed.translated("m"))
        return
    said = rf"kv_lora_rank {latents} and .* are {latents + rotated} .* 320, 512, 576; serve it on a"
    with pytest.raises(CheckpointError, match=said):
        needs.check_heads("m", parsed.translated("m"))


def test_the_rows_are_those_of_vllms_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which every backend of latent attention has."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    assert source.latent_rows() == MLACommonBackend.get_supported_head_sizes()


@pytest.mark.parametrize("base", ["deepseek_v3", "glm4_moe_lite"])
def test_layers_that_predict_further_tokens_are_left_aside(
    base: str, tmp_path: Path, sentence: Sentence
) -> None:
    """Where config.json says that there are some; `verify` leaves them aside too."""
    folder = written(tmp_path, base, **{FURTHER: 1})
    before = describe(check_folder(folder))
    ids = [7, 8, 9]
    expected = tiny_sites.load(folder).logprobs(ids)
    name = "model.layers.4.eh_proj.weight"
    edit(folder, lambda t: t.update({name: t["model.norm.weight"].clone()}))
    assert describe(check_folder(folder)) == before | {"left_aside": 1}  # no whole head
    assert tiny_sites.load(folder).logprobs(ids).equal(expected)
    for value in (0, "1"):
        edit(folder, **{FURTHER: value})
        sentence.raises(CheckpointError, check_folder, folder)


@pytest.mark.parametrize(("base", "name"), [("ernie4_5_moe", "model.mtp_"), ("exaone_moe", "mtp.")])
def test_a_head_that_predicts_further_tokens_is_left_aside(
    base: str, name: str, tmp_path: Path
) -> None:
    """Whatever it holds, depth attention of its own too."""
    folder = write_house(tmp_path, base, block_size=3, layers=4)
    before = describe(check_folder(folder))
    for leaf in ("block.0.input_layernorm.weight", "layers.0.mlp_res_norm.weight"):
        edit(folder, lambda t, leaf=leaf: t.update({name + leaf: t["model.norm.weight"].clone()}))
    assert describe(check_folder(folder)) == before | {"left_aside": 2}
