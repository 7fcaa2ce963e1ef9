"""Kimi Linear in its own format, whose key counts layers, in shapes of its own."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from checkpoints import write_house
from checkpoints.kimi import write_with_more
from facts.kimi_linear import KIMI_LAYERS
from goldens import check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_named, run_random, run_verify, verify_job
from safetensors.torch import load_file, save_file
from serving import FAMILY_GOLDENS

from attnres_serve.settings import ALGORITHMS
from tests.end_to_end.test_families import check_run, chosen

pytestmark = [pytest.mark.engine, pytest.mark.families]

GOLDEN, GOLDEN_K3 = FAMILY_GOLDENS / "kimi_linear", FAMILY_GOLDENS / "kimi_k3"
DEEP = 27
FULL = [*range(4, DEEP, 4), DEEP]  # of the paper's 27 layers, those of full attention
# Layers, layers of a block, those of full attention, and how many of 8 experts a token has.
# In 27 random layers float32 moves a router's scores by up to 1e-5.  Among some 4000 choices one is
# often closer than that and falls the other way.  So every token there has all experts, and the
# shallow shapes test the choice.
SHAPES = {
    "the paper's": (DEEP, 3, FULL, 8),
    "a block for each layer": (3, 1, [1], 2),
    "a short last block": (5, 2, [3, 5], 2),
    "one block": (4, 6, [2, 3], 2),
}
# What Kimi K3 has beside, without experts, with those of full width, and with those on a latent.
GATES = {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
WITHOUT_EXPERTS = dict.fromkeys(
    ("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size")
)
SITU = {"hidden_act": "situ", "activation_situ_beta": 2.0}
K3: dict[str, dict[str, Any]] = {
    "dense": WITHOUT_EXPERTS
    | SITU
    | {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "mla_use_output_gate": True,
        "activation_situ_linear_beta": 3.0,
    }
    | {"linear_attn_config": KIMI_LAYERS["linear_attn_config"] | GATES},
    "dense, without bounds": WITHOUT_EXPERTS
    | SITU
    | {"mla_use_output_gate": False, "hidden_size": 60}  # by 4 heads: an odd number
    | {"linear_attn_config": KIMI_LAYERS["linear_attn_config"] | {"use_full_rank_gate": True}},
    "experts": {
        "mla_use_output_gate": True,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "linear_attn_config": KIMI_LAYERS["linear_attn_config"] | GATES,
    },
    "experts on a latent": SITU
    | {"q_lora_rank": 48, "mla_use_output_gate": True, "activation_situ_linear_beta": 3.0}
    | {"routed_expert_hidden_size": 40, "latent_moe_use_norm": True, "num_shared_experts": 2}
    | {"linear_attn_config": KIMI_LAYERS["linear_attn_config"] | GATES},
    "experts in groups on a wide latent, none of them normed": SITU
    | {"mla_use_output_gate": False, "routed_expert_hidden_size": 160, "first_k_dense_replace": 0}
    | {"moe_intermediate_size": 24, "num_expert_group": 4, "topk_group": 2},
    "experts of full width, one a token": SITU
    | {"mla_use_output_gate": True, "num_experts_per_token": 1, "moe_renormalize": False}
    | {"first_k_dense_replace": 2},
}


def layers_of(count: int, full: list[int]) -> dict[str, Any]:
    kda = [layer for layer in range(1, count + 1) if layer not in full]
    sizes = {"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4}
    return {"linear_attn_config": {"kda_layers": kda, "full_attn_layers": full, **sizes}}


def write_own(
    folder: Path, *, layers: int, block_layers: int, full: list[int], experts: int, seed: int
) -> Path:
    """A checkpoint of the house format in Kimi Linear's own. Returns its folder."""
    changes = layers_of(layers, full) | {"num_experts_per_token": experts}
    write_house(
        folder,
        "kimi_linear",
        layers=layers,
        block_size=2 * block_layers,
        seed=seed,
        changes=changes,
    )
    config = json.loads((folder / "config.json").read_text())
    del config["attn_res"]
    own = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    own |= {"attn_res_block_size": block_layers, "model_max_length": 512}
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | own))
    if layers == DEEP:
        damp(folder / "model.safetensors")
    return folder


def damp(file: Path) -> None:
    """Make queries and what sublayers give smaller, by powers of two.

    The weights as drawn make 27 layers chaotic: rounding them to float32 moves a logprob by up to
    5e-2, damped ones by 2e-5.
    """
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("_res_proj.weight", "_res_proj")):
            tensors[name] = tensor / 4
        elif name.endswith((".o_proj.weight", ".down_proj.weight", ".w2.weight")):
            tensors[name] = tensor / 8
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    sizes = ("layers", "block_layers", "full", "experts")
    writers = {
        name: partial(write_own, **dict(zip(sizes, shape, strict=True)))
        for name, shape in SHAPES.items()
    }
    return run_random(tmp_path_factory.mktemp("shapes"), writers, (7, 100, 1))


@pytest.mark.parametrize("name", SHAPES)
def test_its_own_format_equals_hugging_faces_class_with_mixes(runs, name):
    check(*runs[name])


def check(folder: Path, job: dict[str, Any], result: dict[str, Any]) -> None:
    check_all_against(tiny_sites.load(folder), job, result, caches_prefixes=False)
    check_executed(result, job["algorithm"], compiled=False)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    writers = {
        name: partial(write_house, base="kimi_linear", layers=4, block_size=3, changes=changes)
        for name, changes in K3.items()
    }
    return run_random(tmp_path_factory.mktemp("k3"), writers, (7, 100, 1))


@pytest.mark.parametrize("name", K3)
def test_what_kimi_k3_has_beside(k3, name):
    check(*k3[name])


TWO = {"distributed_executor_backend": "mp"}
SHARED = {"tensor_parallel_size": 2, **TWO}
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "TP": ("single_pass", "eager", SHARED),
    "EP": (
        "two_phase",
        "eager",
        {"enable_expert_parallel": True, **SHARED},
    ),
    "PP in a block": ("two_phase", "compiled", {"pipeline_parallel_size": 2, **TWO}),
}
COMPILED = {f"compiled, {name}": (name, "compiled", {}) for name in ALGORITHMS}


@pytest.fixture(scope="module")
def ways(request, tmp_path_factory):
    """Kimi K3's golden as a part of a model that reads images, in every way of running."""
    root = tmp_path_factory.mktemp("ways")
    folder, prompts = write_with_more(root / "whole", GOLDEN_K3), fresh_prompts((7, 100, 1))
    jobs = {
        name: engine_job(folder, prompts, algorithm, mode, trace=True, **options)
        for name, (algorithm, mode, options) in (COMPILED | WAYS).items()
        if name in chosen(request, "name")
    }
    if stages := jobs.get("PP in a block"):  # the last, as it leaves its variable
        stages["env"] = {"VLLM_PP_LAYER_PARTITION": "3,2"}
    return run_named(jobs, root / "run")


@pytest.mark.parametrize(
    "name", [*WAYS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in COMPILED)]
)
def test_kimi_k3_in_every_way(ways, name):
    check_run(tiny_sites.load(GOLDEN_K3), *ways[name], caches_prefixes=False)


def test_verify_judges_them(tmp_path):
    prompts = fresh_prompts((40,))
    jobs = [verify_job(golden, golden, prompts) for golden in (GOLDEN, GOLDEN_K3)]
    for report in run_verify(jobs, tmp_path):
        assert report["holds"], report
