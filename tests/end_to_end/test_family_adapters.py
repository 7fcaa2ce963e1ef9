"""LoRA adapters on every family that takes them, against the weights that they are merged into.

The judge is Hugging Face's class in float64 with the mixes, of the merged checkpoint, as in
``test_families``. Adapters change every linear layer except those that ``adapters.UNTAKEN``
has and the routers. ``test_features`` has an adapter of Qwen3 in ``make test``.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
from adapters import UNTAKEN, WEIGHTS, linear_layers, targets, write_adapter, write_merged
from checkpoints import write_house
from facts import FACTS
from goldens import check_answers, check_executed
from jobs import engine_job, fresh_prompts, run_engine, run_named
from safetensors.torch import load_file

from attnres_serve.families import FAMILIES
from attnres_serve.families.limits import Limit
from tests.end_to_end.test_families import JUDGED, chosen
from tests.end_to_end.test_parallel import sharded

pytestmark = [pytest.mark.engine, pytest.mark.families]

# What else is refused by name: GLM-4 saves as one tensor what vLLM lets adapters change in parts.
REFUSED_LAYERS = {"glm4": "gate_up_proj", "llama4_text": r"\.[qk]_proj"}
TAKES = [name for name in JUDGED if Limit.ADAPTERS not in FAMILIES[name].limits]
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
Asked = tuple[Path, dict[str, Any]]  # the merged checkpoint, and the job


def ask(root: Path, name: str, also: tuple[str, ...] = (), **options: Any) -> Asked:
    """A checkpoint of a family with an adapter of whatever it takes, and of some layers more."""
    changes = next(iter(FACTS[name].variants.values()))
    seed = random.randrange(10**6)
    base = write_house(root / name, name, layers=4, block_size=3, seed=seed, changes=changes)
    untaken = "|".join(filter(None, (UNTAKEN, REFUSED_LAYERS.get(name))))
    layers = [*linear_layers(load_file(base / WEIGHTS), untaken), *also]
    merged = write_merged(root / f"{name}-adapter", base, layers)
    own = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets(layers)}
    adapter = root / f"{name}-adapter"
    return merged, engine_job(
        base, fresh_prompts((9, 150)), "two_phase", lora=adapter, **own, **options
    )


def check(asked: Asked, result: dict[str, Any]) -> None:
    merged, job = asked
    base, model = tiny_sites.load(Path(job["checkpoint"])), tiny_sites.load(merged)
    prompt = job["prompts"][0]
    assert (base.logprobs(prompt) - model.logprobs(prompt)).abs().max() > 0.1
    check_answers(model, job, result)
    check_executed(result, "two_phase", compiled=False)


@pytest.fixture(scope="module")
def with_adapters(request, tmp_path_factory):
    random.seed()
    root = tmp_path_factory.mktemp("adapters")
    asked = {name: ask(root, name) for name in chosen(request, "name")}
    results = run_named({name: job for name, (_, job) in asked.items()}, root / "run")
    return {name: (asked[name], result) for name, (_, result) in results.items()}


@pytest.mark.parametrize("name", TAKES)
def test_an_adapter_equals_the_weights_it_is_merged_into(with_adapters, name, record_property):
    check(*with_adapters[name])
    record_property("shows", (name, "LoRA"))


def test_an_adapter_of_the_embedding(tmp_path):
    random.seed()
    asked = ask(tmp_path, "llama", ("model.embed_tokens",))
    check(asked, run_engine([asked[1]], tmp_path / "run")["results"][0])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_two_workers_share_an_adapter(name, tmp_path):
    """Latent attention has projections that every worker has whole; sites may be sharded."""
    random.seed()
    merged, whole = ask(tmp_path, name, **TWO)
    jobs = [whole, sharded(whole)]  # eager, as vLLM runs adapters on a CPU
    for job, result in zip(jobs, run_engine(jobs, tmp_path / "run")["results"], strict=True):
        check((merged, job), result)


@pytest.mark.parametrize(
    ("name", "leaf", "says"),
    [
        ("deepseek_v3", "self_attn.kv_b_proj", "which vLLM folds into other weights"),
        ("llama4_text", "self_attn.q_proj", "which vLLM gives another order of rows"),
        ("qwen2_moe", "mlp.shared_expert_gate", "to which vLLM applies no adapter in this model"),
    ],
)
def test_an_adapter_that_vllm_would_ignore_is_refused(name, leaf, says, tmp_path):
    """Left to itself vLLM answers as if there was no adapter."""
    _, job = ask(tmp_path, name)
    tensors = load_file(Path(job["checkpoint"]) / WEIGHTS)
    layers = [layer.removesuffix(".weight") for layer in tensors if f"{leaf}.weight" in layer]
    write_adapter(tmp_path / "ignored", tensors, layers)
    job["options"]["lora_target_modules"] += targets(layers)
    job["refused"] = str(tmp_path / "ignored")
    (result,) = run_engine([job], tmp_path / "run")["results"]
    assert result["refusal"].startswith(f"the LoRA adapter 'refused' changes {layers[0]}, {says}")
