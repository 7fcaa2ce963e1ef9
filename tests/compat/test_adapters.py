"""LoRA adapters that a model does not take, or not whole."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import TINY
from torch import nn
from vllm_configs import vllm_config

from attnres_serve.compat import device, rules
from attnres_serve.compat.device import Kind
from attnres_serve.compat.engine_facts import EngineFacts
from attnres_serve.compat.workarounds import experts_beside_adapters, whole_adapters
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit

vllm = pytest.importorskip("vllm")

REMEDY = "start without --enable-lora, and merge the adapter into the weights."


def asked(name: str, *targets: str, workers: int = 1, lora: bool = True) -> EngineFacts:
    """Adapters for a family with its tiny config.json."""
    own = SimpleNamespace(target_modules=[*targets] or None) if lora else None
    result = vllm_config(lora_config=own)
    result.parallel_config.tensor_parallel_size = workers
    model = result.model_config
    model.enforce_eager = True
    model.hf_config.attn_res_format = "house"
    model.hf_config.architectures = [FAMILIES[name].architecture]
    model.hf_config.attn_res_config = TINY[name]
    return EngineFacts(result)


@pytest.mark.parametrize(
    "name", ["mamba2", "bailing_hybrid", "kda", "gated_deltanet", "kimi_linear", "alice_ai"]
)
def test_a_family_without_adapters(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        rules.require(asked(name))
    expected = f"LoRA adapters are not supported on {FAMILIES[name].title}; {REMEDY}"
    assert str(caught.value) == expected
    rules.require(asked("llama"))
    rules.require(asked(name, lora=False))


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_workers_that_would_cut_adapters_otherwise_than_weights(name: str) -> None:
    with pytest.raises(SettingError, match=rf"^--tensor-parallel-size is 2, .*{REMEDY}$"):
        rules.require(asked(name, "q_proj", workers=2))
    rules.require(asked(name, "q_proj"))
    rules.require(asked("qwen3_moe", "q_proj", workers=2))


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.is_stock])
def test_the_families_without_adapters_are_vllms(family: Family) -> None:
    """Others would be refused when they are loaded, or end by an assertion."""
    from vllm.model_executor.models.interfaces import supports_lora

    own = getattr(importlib.import_module(family.module), family.cls)
    assert supports_lora(own) == (Limit.ADAPTERS not in family.limits)


def test_experts_without_adapters_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    for targets, message in (
        ((), "is not given; name layers beside"),
        (
            ("q_proj", "model.layers.0.mlp.experts"),
            "is q_proj model.layers.0.mlp.experts; name layers",
        ),
    ):
        with pytest.raises(SettingError, match=f"--lora-target-modules {message}"):
            rules.require(asked("qwen3_moe", *targets))
    rules.require(asked("qwen3_moe", "q_proj", "w1", "shared_experts"))
    rules.require(asked("llama"))
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    rules.require(asked("qwen3_moe"))


def test_a_cpu_has_no_experts_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM finds one by itself, the workaround and the refusal can go."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    asked = []
    monkeypatch.setattr(module, "select_unquantized_moe_backend", asked.append)
    experts_beside_adapters.PATCH.apply()
    experts_beside_adapters.PATCH.apply()
    module.select_unquantized_moe_backend(SimpleNamespace(is_lora_enabled=True))  # type: ignore[arg-type]
    assert asked == [SimpleNamespace(is_lora_enabled=False)]


# --- an adapter that is not whole

ATTENTION = "model.layers.0.self_attn"


def manager(*, latent: bool = False, experts: bool = False) -> SimpleNamespace:
    """As much of vLLM's LoRAModelManager as is looked at."""
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.utils import PPMissingLayer

    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module(), PPMissingLayer()])
    if latent:
        model.attention = MLAAttention.__new__(MLAAttention)
        nn.Module.__init__(model.attention)
    modules = [f"{ATTENTION}.qkv_proj", f"{ATTENTION}.kv_b_proj", "model.layers.0.conv.conv"]
    if experts:
        modules.append("model.layers.0.mlp.experts")
    packed = {f"{ATTENTION}.qkv_proj": [f"{ATTENTION}.{part}_proj" for part in "qkv"]}
    embedding = VocabParallelEmbeddingWithLoRA.__new__(VocabParallelEmbeddingWithLoRA)
    nn.Module.__init__(embedding)
    embedding.base_layer = nn.Module()
    result = {name: SimpleNamespace(base_layer=nn.Module()) for name in modules}
    return SimpleNamespace(
        model=model,
        modules={**result, "model.embed_tokens": embedding},
        packed_modules=packed,
    )


def of_attnres() -> SimpleNamespace:
    result = manager()
    result.model.attn_res_base = SimpleNamespace(needed={}, reordered=())
    return result


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (f"{ATTENTION}.q_proj", {}, None),
        (f"{ATTENTION}.kv_b_proj", {}, None),
        (f"{ATTENTION}.kv_b_proj", {"latent": True}, "vLLM folds into other weights"),
        (f"{ATTENTION}.q_proj", {"latent": True}, None),
        (f"{ATTENTION}.q_proj", {"reordered": True}, "gives another order of rows"),
        (f"{ATTENTION}.v_proj", {"reordered": True}, None),
        (f"{ATTENTION}.o_proj", {}, "to which vLLM applies no adapter in this model"),
        ("model.layers.7.self_attn.q_proj", {}, "vLLM applies no adapter"),
        ("model.layers.1.self_attn.q_proj", {}, None),  # another stage's
        ("model.layers.0.mlp.experts.1.up_proj", {}, "vLLM applies no adapter"),
        ("model.layers.0.mlp.experts.1.up_proj", {"experts": True}, None),
        ("model.embed_tokens", {}, None),
    ],
)
def test_an_adapter_is_taken_whole(name: str, given: dict[str, bool], says: str | None) -> None:
    given = dict(given)
    reordered = FAMILIES["llama4_text"].reordered if given.pop("reordered", False) else ()
    result = whole_adapters.problem([name], manager(**given), reordered)
    if says is None:
        assert result is None
    else:
        assert result is not None and says in result and name in result and result.endswith(".")


def test_a_layer_that_is_run_without_its_wrapper() -> None:
    own, name = manager(), f"{ATTENTION}.q_proj"
    own.model.second = own.modules[f"{ATTENTION}.qkv_proj"].base_layer
    result = whole_adapters.problem([name], own)
    assert result is not None and "to which vLLM applies no adapter in this model" in result


def test_names_of_vllm() -> None:
    """Some of its classes rename layers when they load, and adapters' names with them."""
    from vllm.model_executor.models.utils import WeightsMapper

    own = manager()
    own.model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".attention.": ".self_attn."})
    worker = SimpleNamespace(
        _adapter_manager=own, lora_config=SimpleNamespace(max_lora_rank=16, lora_dtype=None)
    )
    name = "model.layers.0.attention.q_proj.weight"
    needed = whole_adapters._described(worker, {name: (12, 8)}).weight_shapes
    assert needed == dict.fromkeys((name, f"{ATTENTION}.q_proj.weight"), (12, 8))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Loads an adapter into a worker of a model, as vLLM does, by what vLLM makes of its files."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    result: dict[str, Any] = {}

    def of_vllm(self, request):
        if isinstance(result["adapter"], Exception):
            raise result["adapter"]
        return result["adapter"]

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", of_vllm)
    whole_adapters.PATCH.apply()
    whole_adapters.PATCH.apply()
    config = SimpleNamespace(max_lora_rank=16, lora_dtype=torch.float32)
    request = SimpleNamespace(lora_name="mine", lora_int_id=1, lora_path="", load_inplace=False)

    def load(adapter: Any, own: SimpleNamespace, path: Path | None = None) -> Any:
        result["adapter"] = adapter
        worker: Any = SimpleNamespace(_adapter_manager=own, lora_config=config)
        request.lora_path = str(path or tmp_path / "nowhere")
        return WorkerLoRAManager._load_adapter(worker, request)  # type: ignore[arg-type]

    return load


def test_adapters_of_other_models_are_left_alone(loads) -> None:
    adapter = SimpleNamespace(loras=[f"{ATTENTION}.o_proj"])
    assert loads(adapter, manager()) is adapter
    message = "the LoRA adapter 'mine' changes model.*o_proj, to which"
    with pytest.raises(ValueError, match=message):
        loads(adapter, of_attnres())


def test_files_are_checked_before_vllm_reads_them(loads, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^the LoRA adapter 'mine' has no adapter_config"):
        loads(RuntimeError("read"), of_attnres(), tmp_path)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (
            "While loading /x, expected target modules in {'q_proj', 'v_proj'} but received "
            "['model.layers.0.router', 'model.layers.0.router']. Please verify that the loaded "
            "LoRA module is correct",
            "changes model.layers.0.router, to which vLLM applies no adapter in this model;",
        ),
        ("Two\nlines", "cannot be loaded (Two); merge it into the weights."),
        ("One line.", "cannot be loaded (One line); merge it into the weights."),
    ],
)
def test_what_vllm_refuses_is_one_sentence(loads, reason: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        loads(ValueError(reason), of_attnres())
    assert str(caught.value).startswith(f"the LoRA adapter 'mine' {says}")
    assert "\n" not in str(caught.value)
