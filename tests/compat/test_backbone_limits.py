"""Settings that some of vLLM's layers cannot have with AttnRes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnres_serve.compat import backbone_limits, host
from attnres_serve.errors import SettingError

vllm = pytest.importorskip("vllm")

MODELS = "vllm.model_executor.models"


def config(
    dtype: torch.dtype = torch.bfloat16,
    split: bool = False,
    workers: int = 1,
    stages: int = 1,
    kinds: str = "",
    drafts: int = 0,
    eager: bool = False,
    **sizes: Any,
):
    names = {"F": "full_attention", "L": "linear_attention"}
    own = SimpleNamespace(layer_types=[names[kind] for kind in kinds], **sizes)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=own, enforce_eager=eager),
        num_speculative_tokens=drafts,
        parallel_config=SimpleNamespace(
            use_sequence_parallel_moe=split,
            tensor_parallel_size=workers,
            pipeline_parallel_size=stages,
        ),
    )


@pytest.mark.parametrize(
    ("given", "module", "sentence"),
    [
        (
            {"dtype": torch.float16},
            f"{MODELS}.deepseek_v2",
            "--dtype is float16, in which vLLM's layers of this family scale the residual, and "
            "AttnRes has none to scale; choose bfloat16 or float32.",
        ),
        (
            {"split": True, "workers": 2},
            f"{MODELS}.qwen3_next",
            "expert parallelism with tensor and data parallelism splits the residual of this "
            "family's layers over workers, which AttnRes does not support; leave one of the three "
            "out.",
        ),
        (
            {"workers": 4},
            "vllm.models.minimax_m3.nvidia.model",
            "--tensor-parallel-size is 4, with which vLLM's layers of this family norm within "
            "their all-reduce and leave out the sites of AttnRes; serve it on one worker.",
        ),
    ],
)
def test_a_setting_is_refused_for_the_families_that_it_breaks(
    given: dict, module: str, sentence: str
) -> None:
    with pytest.raises(SettingError) as raised:
        backbone_limits.require_whole_residual(config(**given), module)
    assert str(raised.value) == sentence
    backbone_limits.require_whole_residual(config(**given), f"{MODELS}.llama")
    backbone_limits.require_whole_residual(config(), module)


def test_lightning_attention_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{MODELS}.bailing_moe_linear"
    monkeypatch.setattr(host, "on_cpu", lambda: True)
    backbone_limits.require_whole_residual(config(), module)
    monkeypatch.setattr(host, "on_cpu", lambda: False)
    backbone_limits.require_whole_residual(config(), f"{MODELS}.llama")
    with pytest.raises(SettingError, match=r"lightning attention .* serve this family on a CPU"):
        backbone_limits.require_whole_residual(config(), module)


def test_a_stage_with_one_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{MODELS}.qwen3_next"
    monkeypatch.setattr(host, "on_cpu", lambda: True)
    for kinds in ("LFLF", "FLLF", "FFFF", ""):
        backbone_limits.require_whole_residual(config(stages=2, kinds=kinds), module)
    for kinds in ("LFLL", "FLFF"):
        backbone_limits.require_whole_residual(config(stages=2, kinds=kinds), KIMI)
        with pytest.raises(SettingError, match="stage of the layers 2 to 3 has one kind of layer"):
            backbone_limits.require_whole_residual(config(stages=2, kinds=kinds), module)
    monkeypatch.setattr(host, "on_cpu", lambda: False)
    backbone_limits.require_whole_residual(config(stages=2, kinds="LFLL"), module)


KIMI = "attnres_serve.model.kimi"


@pytest.mark.parametrize(
    ("on_cpu", "given", "module", "says"),
    [
        (True, {"drafts": 3}, f"{MODELS}.qwen3_next", "decoding with 3 tokens is not supported"),
        (False, {}, backbone_limits.ALICE_AI, "cannot be compiled on this device"),
        (False, {}, backbone_limits.KDA, "cannot be compiled on this device"),
        (True, {"drafts": 3}, backbone_limits.KDA, "decoding with 3 tokens is not supported"),
    ],
)
def test_what_linear_attention_cannot_have(
    on_cpu: bool, given: dict, module: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "on_cpu", lambda: on_cpu)
    with pytest.raises(SettingError, match=says):
        backbone_limits.require_whole_residual(config(**given), module)
    backbone_limits.require_whole_residual(config(**given), f"{MODELS}.llama")
    backbone_limits.require_whole_residual(config(eager=True), module)


def test_linear_attention_needs_the_version_that_it_was_run_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(SettingError, match=r"linear attention need vLLM 0\.32 or later"):
        backbone_limits.require_whole_residual(config(), KIMI)
    backbone_limits.require_whole_residual(config(), f"{MODELS}.llama")


def naming(folder: str, *texts: str) -> set[str]:
    """Names of vLLM's model files, or of their packages, that contain a text."""
    start = Path(vllm.__file__).parent / folder
    return {
        path.relative_to(start).with_suffix("").parts[0]
        for path in start.rglob("*.py")
        if any(text in path.read_text(encoding="utf-8") for text in texts)
    }


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("residual *= 1.0 / self.routed_scaling_factor", "SCALES_RESIDUAL_IN_FLOAT16"),
        ("residual = sequence_parallel_chunk(residual)", "SPLITS_RESIDUAL"),
        ("self.use_fused_all_reduce", "FUSES_ALL_REDUCE"),
    ],
)
def test_the_families_are_those_of_the_installed_vllm(text: str, known: str) -> None:
    found = naming("model_executor/models", text)
    assert found and found <= set(getattr(backbone_limits, known))


@pytest.mark.parametrize(
    ("sizes", "said"),
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
    sizes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "attnres_serve.model.gated_deltanet"
    monkeypatch.setattr(host, "on_cpu", lambda: False)
    if said is None:
        backbone_limits.require_whole_residual(config(**sizes), module)
    else:
        with pytest.raises(SettingError, match=f"{said}.*; serve this model on a CPU"):
            backbone_limits.require_whole_residual(config(**sizes), module)
    monkeypatch.setattr(host, "on_cpu", lambda: True)
    backbone_limits.require_whole_residual(config(**sizes), module)


@pytest.mark.parametrize("key", ["linear_num_key_heads", "linear_num_value_heads"])
def test_workers_that_would_share_a_head_of_a_recurrence(key: str) -> None:
    module = "attnres_serve.model.gated_deltanet"
    with pytest.raises(SettingError, match=f"-size is 2, which does not divide {key}, 3; choose"):
        backbone_limits.require_whole_residual(config(workers=2, **{key: 3}), module)
    backbone_limits.require_whole_residual(config(workers=2, **{key: 4}), module)
