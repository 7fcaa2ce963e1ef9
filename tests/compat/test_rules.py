"""What a configuration cannot have, by limits of a family and for all of them."""

import importlib
import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import TINY
from vllm_configs import vllm_config

from attnres_serve.compat import device, rules, versions
from attnres_serve.compat.device import Kind
from attnres_serve.compat.engine_facts import EngineFacts
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Config, Family
from attnres_serve.families.limits import Limit

vllm = pytest.importorskip("vllm")


def config(
    dtype: torch.dtype = torch.bfloat16,
    split: bool = False,
    workers: int = 1,
    engines: int = 1,
    stages: int = 1,
    layers: int = 4,
    drafts: int = 0,
    prefixes: bool = False,
    hybrid: bool = True,
    eager: bool = False,
    **sizes: Any,
):
    result = vllm_config(num_speculative_tokens=drafts)
    model, parallel = result.model_config, result.parallel_config
    model.dtype, model.enforce_eager, model.is_hybrid = dtype, eager, hybrid
    model.hf_text_config = SimpleNamespace(num_hidden_layers=layers, **sizes)
    result.cache_config.enable_prefix_caching = prefixes
    parallel.use_sequence_parallel_moe = split
    parallel.tensor_parallel_size, parallel.data_parallel_size = workers, engines
    parallel.pipeline_parallel_size = stages
    return result


def require(name: str, changes: Config | None = None, **given: Any) -> None:
    """Ask for the settings of a family with its tiny config.json, changed."""
    result = config(**given)
    model = result.model_config.hf_config
    model.architectures = [FAMILIES[name].architecture]
    model.attn_res_config = {**TINY[name], **(changes or {})}
    rules.require(EngineFacts(result))


def refused(sentence: str | bool | None) -> AbstractContextManager:
    """What is refused with a sentence, or taken where there is none."""
    return pytest.raises(SettingError, match=sentence) if sentence else nullcontext()


@pytest.mark.parametrize(
    ("given", "name", "sentence"),
    [
        (
            {"dtype": torch.float16},
            "deepseek_v3",
            "--dtype is float16, in which vLLM's layers of this family scale the residual, and "
            "AttnRes has none to scale; choose bfloat16 or float32.",
        ),
        (
            {"split": True, "workers": 2},
            "qwen3_next",
            "expert parallelism with tensor and data parallelism splits the residual of this "
            "family's layers over workers, which AttnRes does not support; leave one of the three "
            "out.",
        ),
    ],
)
def test_a_setting_is_refused_for_the_families_that_it_breaks(
    given: dict, name: str, sentence: str
) -> None:
    with pytest.raises(SettingError) as raised:
        require(name, **given)
    assert str(raised.value) == sentence
    require("llama", **given)
    require(name)


def test_lightning_attention_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    require("bailing_hybrid")
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    require("llama")
    with pytest.raises(SettingError, match=r"lightning attention .* serve this family on a CPU"):
        require("bailing_hybrid")


HALVES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("qwen3_next", "layer_types", {"F": "full_attention", "L": "linear_attention"}),
    ("lfm2", "layer_types", {"F": "full_attention", "L": "conv"}),
    ("lfm2_moe", "layer_types", {"F": "full_attention", "L": "conv"}),
    ("nemotron_h", "hybrid_override_pattern", {"F": "*", "L": "M"}),
)


@pytest.mark.parametrize(("name", "key", "kinds"), HALVES)
def test_a_stage_with_one_kind_of_cache(
    name: str, key: str, kinds: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(letters: str) -> dict[str, Any]:
        result = [kinds[letter] for letter in letters]
        return {key: result if key == "layer_types" else "".join(result), "num_dense_layers": 0}

    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    for letters in ("LFLF", "FLLF"):
        require(name, layers(letters), stages=2)
    for letters, has in (("LFLL", "a KV cache"), ("FLFF", "a recurrent state")):
        require(name, layers(letters))
        with pytest.raises(SettingError) as raised:
            require(name, layers(letters), stages=2)
        assert str(raised.value) == (
            f"the pipeline stage of the layers 2 to 3 has no layer with {has}, which vLLM cannot "
            "run beside other stages on CPU; set VLLM_PP_LAYER_PARTITION so that each stage has "
            "one, or a smaller --pipeline-parallel-size."
        )
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    with pytest.raises(SettingError, match="layers 0 to 0 has no layer with"):
        require(name, layers("LFLF"), stages=2)
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    require(name, layers("LFLF"), stages=2)


def test_layers_without_any_cache_are_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with an MLP beside one layer of each kind; and a model of one kind alone."""
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    pattern = "hybrid_override_pattern"
    require("nemotron_h", {pattern: "M*-M*-", "num_hidden_layers": 6}, stages=2, layers=6)
    require("lfm2", {"layer_types": ["conv"] * 4}, stages=2)
    with pytest.raises(SettingError, match="layers 2 to 3 has no layer with a KV cache"):
        require("nemotron_h", {pattern: "M*M-"}, stages=2)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("afmoe", {"num_dense_layers": 2}),
        ("glm4_moe", {"first_k_dense_replace": 2}),
        ("glm4_moe_lite", {"first_k_dense_replace": 2, "mlp_layer_types": None}),
        ("lfm2_moe", {"num_dense_layers": 2, "layer_types": ["conv", "full_attention"] * 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_next", {"mlp_only_layers": [0, 1]}),
    ],
)
def test_a_stage_without_experts(
    name: str, changes: Config, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "glm4_moe_lite":
        changes = {**changes, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU if on_cpu else Kind.CUDA)
    require(name, changes)
    with pytest.raises(SettingError) as raised:
        require(name, changes, stages=2)
    assert str(raised.value) == (
        "the pipeline stage of the layers 0 to 1 has no layer with experts, which vLLM's class of "
        "this family needs; set VLLM_PP_LAYER_PARTITION so that each stage has one, or a smaller "
        "--pipeline-parallel-size."
    )
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    if Limit.BOTH_CACHES not in FAMILIES[name].limits:
        require(name, changes, stages=2)


@pytest.mark.parametrize(
    ("on_cpu", "given", "name", "says"),
    [
        (True, {"drafts": 3, "prefixes": True}, "qwen3_next", "add --no-enable-prefix-caching"),
        (False, {}, "alice_ai", "cannot be compiled on this device"),
        (False, {}, "kda", "cannot be compiled on this device"),
        (True, {"drafts": 3, "prefixes": True}, "kimi_linear", "add --no-enable-prefix-caching"),
        (False, {"drafts": 3, "eager": True, "hybrid": False}, "kda", "states cannot go back"),
    ],
)
def test_what_linear_attention_cannot_have(
    on_cpu: bool, given: dict, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU if on_cpu else Kind.CUDA)
    with pytest.raises(SettingError, match=says):
        require(name, **given)
    require("llama", **given)
    require(name, eager=True)


def test_drafts_where_a_state_cannot_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family with recurrent states has slots for drafts, or refuses them on a CPU."""
    recurrent = [name for name in TINY if FAMILIES[name].state_bytes(TINY[name], 2)]
    refused = [name for name in recurrent if Limit.DRAFTS in FAMILIES[name].limits]
    assert {*refused} >= {"lfm2", "lfm2_moe", "mamba2", "nemotron_h", "bailing_hybrid", "kda"}
    for name in {*recurrent} - {*refused}:
        assert Limit.LINEAR_ATTENTION in FAMILIES[name].limits
        monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
        require(name, drafts=3)
    for name in refused:
        monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
        require(name)
        with pytest.raises(SettingError, match=r"with 3 tokens is not supported here for this f"):
            require(name, drafts=3)


def test_linear_attention_needs_the_version_that_it_was_run_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(SettingError, match=r"linear attention need vLLM 0\.32 or later"):
        require("kimi_linear")
    require("llama")


@pytest.mark.parametrize(
    ("version", "on_cpu", "drafts", "is_refused"),
    [
        ("0.29.0", True, 3, False),
        ("0.30.0", True, 3, True),
        ("0.30.2", True, 1, True),
        ("0.30.0", True, 0, False),
        ("0.30.0", False, 3, False),
        ("0.31.0", True, 3, False),
    ],
)
def test_drafts_on_a_cpu_with_a_vllm_that_has_no_kernels_for_them(
    version: str, on_cpu: bool, drafts: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU if on_cpu else Kind.CUDA)
    with refused(is_refused and r"on a CPU ends the engine of vLLM 0\.30; install"):
        require("llama", drafts=drafts)


def source(family: Family) -> str:
    """The files that define a family's class and those that it is made of, as text."""
    importlib.import_module(family.module)
    own = getattr(sys.modules[family.module], family.cls)
    classes = [cls for cls in own.__mro__ if cls.__module__.startswith(("vllm.", "attnres_"))]
    files = {cls.__module__ for cls in classes if "interfaces" not in cls.__module__}
    return "\n".join(inspect.getsource(sys.modules[name]) for name in sorted(files))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("residual *= 1.0 / self.routed_scaling_factor", Limit.FLOAT16),
        ("residual = sequence_parallel_chunk(residual)", Limit.SEQUENCE_PARALLEL),
        ("example_layer is None:\n            raise RuntimeError", Limit.EXPERTS),
        ("if example_moe is None:\n            raise RuntimeError", Limit.EXPERTS),
        ("if example_moe is None and self.num_moe_layers > 0:", Limit.EXPERTS),
        ("MambaMixer2(", Limit.PREFIX_CACHING),
    ],
)
def test_the_limits_are_those_of_the_installed_vllm(text: str, limit: Limit) -> None:
    result = [family for family in FAMILIES.values() if text in source(family)]
    assert result and all(limit in family.limits for family in result)


def test_the_limit_of_fused_sums_is_no_familys() -> None:
    """Such layers go around the norm that is a site, and leave it out on several workers."""
    assert not [f.name for f in FAMILIES.values() if "self.use_fused_all_reduce" in source(f)]


def test_layers_that_are_reordered_are_those_of_the_installed_vllm() -> None:
    text = "permute_qk_weight_for_rotary"
    result = [family.reordered for family in FAMILIES.values() if text in source(family)]
    assert result == [("q_proj", "k_proj")]


def test_every_limit_is_refused_somewhere() -> None:
    elsewhere = {Limit.PREFIX_CACHING, Limit.SHOWN_LAYERS, Limit.STOCK_ON_CPU}
    assert {*Limit} - {rule.limit for rule in rules.RULES} == elsewhere
    assert {limit for family in FAMILIES.values() for limit in family.limits} == {*Limit}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim is 5, and vLLM's kernel for GPUs"),
        ({"linear_attn_config": {"short_conv_kernel_size": 6}}, "short_conv_kernel_size is 6"),
        ({"conv_kernel": 8}, "conv_kernel is 8"),
        ({"linear_conv_kernel_dim": 4, "linear_attn_config": None}, None),
        ({"linear_attn_config": {"short_conv_kernel_size": 4}}, None),
        ({}, None),
    ],
)
def test_a_convolution_that_vllms_kernel_computes_wrongly(
    sizes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    with refused(message and f"{message}.*; serve this model on a CPU"):
        require("gated_deltanet", **sizes)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    require("gated_deltanet", **sizes)


@pytest.mark.parametrize("key", ["linear_num_key_heads", "linear_num_value_heads"])
def test_workers_that_would_share_a_head_of_a_recurrence(key: str) -> None:
    with pytest.raises(SettingError, match=f"-size is 2, which does not divide {key}, 3; choose"):
        require("gated_deltanet", workers=2, **{key: 3})
    require("gated_deltanet", workers=2, **{key: 4})


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "granitemoe", "qwen3_next"])
def test_experts_of_several_engines_are_refused_on_a_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their collective is not there on a CPU; models without experts share nothing."""
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    require(name, engines=2)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    with pytest.raises(SettingError, match=r"--data-parallel-size is 2, .* start as many servers"):
        require(name, engines=2)
    require("llama", engines=2)
    require(name)


@pytest.mark.parametrize(
    ("older", "kind", "parallel", "is_refused"),
    [
        (True, Kind.CPU, True, True),
        (True, Kind.CPU, False, False),
        (False, Kind.CPU, True, False),
        (True, Kind.CUDA, True, False),
    ],
)
def test_expert_parallelism_of_older_versions_on_a_cpu(
    older: bool, kind: Kind, parallel: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the experts of other workers, and no patch mends it there."""
    config = vllm_config()
    config.parallel_config.enable_expert_parallel = parallel
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(versions, "is_older_than", lambda other: older and other == (0, 30))
    with refused(is_refused and r"^--enable-expert-parallel is set, .* later vLLM"):
        rules.require(EngineFacts(config))
