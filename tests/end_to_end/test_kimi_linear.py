"""Kimi Linear in its own format, whose key counts layers, in shapes of its own."""

import json
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import kimi_k3_model
import pytest
import tiny_sites
from checkpoints import write_house
from facts.kimi_linear import KIMI_LAYERS
from goldens import check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_named, run_verify
from safetensors.torch import load_file, save_file
from serving import FAMILY_GOLDENS

from attnres_serve.settings import ALGORITHMS

pytestmark = [pytest.mark.engine, pytest.mark.families]

GOLDEN = FAMILY_GOLDENS / "kimi_linear"
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
# What Kimi K3 has beside: dense with everything, and with experts all that they allow.
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
    | {"mla_use_output_gate": False}
    | {"linear_attn_config": KIMI_LAYERS["linear_attn_config"] | {"use_full_rank_gate": True}},
    "experts": {
        "mla_use_output_gate": True,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "linear_attn_config": KIMI_LAYERS["linear_attn_config"] | GATES,
    },
}


def layers_of(count: int, full: list[int]) -> dict[str, Any]:
    kda = [layer for layer in range(1, count + 1) if layer not in full]
    sizes = {"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4}
    return {"linear_attn_config": {"kda_layers": kda, "full_attn_layers": full, **sizes}}


def write_own(
    folder: Path, layers: int, block_layers: int, full: list[int], experts: int, seed: int
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
    """Every shape, served in one process: folder, job and result by its name."""
    random.seed()
    root, jobs = tmp_path_factory.mktemp("shapes"), {}
    for (name, shape), algorithm in zip(SHAPES.items(), cycle(ALGORITHMS), strict=False):
        folder = write_own(root / name, *shape, seed=random.randrange(10**6))
        jobs[name] = engine_job(folder, fresh_prompts((7, 100, 1)), algorithm)
    return root, run_named(jobs, root / "run")


@pytest.mark.parametrize("name", SHAPES)
def test_its_own_format_equals_hugging_faces_class_with_mixes(runs, name):
    root, results = runs
    job, result = results[name]
    check_all_against(tiny_sites.load(root / name), job, result, caches_prefixes=False)
    check_executed(result, job["algorithm"], compiled=False)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    random.seed()
    root, jobs = tmp_path_factory.mktemp("k3"), {}
    for (name, changes), algorithm in zip(K3.items(), cycle(ALGORITHMS), strict=False):
        folder = root / name
        seed = random.randrange(10**6)
        write_house(folder, "kimi_linear", layers=4, block_size=3, seed=seed, changes=changes)
        jobs[name] = engine_job(folder, fresh_prompts((7, 100, 1)), algorithm)
    return root, run_named(jobs, root / "run")


@pytest.mark.parametrize("name", K3)
def test_what_kimi_k3_has_beside(k3, name):
    """Hugging Face's class has none of it: the judge is its Kimi Linear and some lines of ours."""
    root, results = k3
    job, result = results[name]
    check_all_against(kimi_k3_model.load(root / name), job, result, caches_prefixes=False)
    check_executed(result, job["algorithm"], compiled=False)


def test_verify_judges_it(tmp_path):
    prompts = fresh_prompts((40,))
    (report,) = run_verify(
        [
            {
                "served": str(GOLDEN),
                "reference": str(GOLDEN),
                "prompts": prompts,
                "chosen": {"attnres_algorithm": "two_phase"},
                "dtype": "float32",
            }
        ],
        tmp_path,
    )
    assert report["holds"], report
