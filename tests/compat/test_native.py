"""Formats that vLLM serves by itself on a GPU: who serves them, and by whose wish."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from facts import TINY
from serving import FAMILY_GOLDENS
from transformers import PreTrainedConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER as table

from attnres_serve import formats, plugin, settings
from attnres_serve.checkpoints import needs
from attnres_serve.checkpoints.check import check
from attnres_serve.compat import device, native, registry
from attnres_serve.compat.device import Kind
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats import alice_ai, kimi_linear

BLOCK = "attn_res_block_size"
KIMI = TINY["kimi_linear"] | {BLOCK: 2}
K3 = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": KIMI,
    "vision_config": {},
}


@pytest.fixture(params=list(Kind), ids=str)
def vllms_own(request, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vLLM has classes for the device, of every kind in turn."""
    monkeypatch.setattr(device, "kind", lambda: request.param)
    return request.param in (Kind.CUDA, Kind.ROCM)


@pytest.mark.parametrize("expected", ["auto", None, "off"])
@pytest.mark.parametrize("config", [KIMI, K3], ids=["the text", "the whole"])
def test_a_gpu_runs_vllms_own_unless_told_otherwise(
    vllms_own: bool, config: dict[str, Any], expected: str | None
) -> None:
    given = None if expected is None else {settings.NATIVE_KEY: expected}
    assert plugin.is_left_to_vllm(config, given) == (vllms_own and expected != "off")


def test_on_means_a_device_of_vllms_classes(vllms_own: bool) -> None:
    refused = pytest.raises(SettingError, match="on this device; leave it out")
    with nullcontext() if vllms_own else refused:
        assert plugin.is_left_to_vllm(KIMI, {settings.NATIVE_KEY: "on"})


def test_an_older_vllm_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve the checkpoint with standard residuals."""
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    module, name, _ = kimi_linear.NATIVE
    for odd in ((module, name, "gone"), (module, "Gone", "x"), ("vllm.gone", name, "x")):
        changed = replace(kimi_linear.FORMAT, native=native.Native(*odd))
        monkeypatch.setitem(formats.SERVED, kimi_linear.NAME, changed)
        assert not plugin.is_left_to_vllm(KIMI, None)


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        (Kind.CPU, BLOCK, "this project's class, because vLLM's own needs CUDA or ROCm"),
        (Kind.XPU, BLOCK, "this project's class, because vLLM's own needs CUDA or ROCm"),
        (Kind.CUDA, BLOCK, "vLLM's own class, because this is CUDA; --attnres-native off takes"),
        (Kind.ROCM, BLOCK, "vLLM's own class, because this is ROCm; --attnres-native off takes"),
        (Kind.CUDA, "gone", "this project's class, because this vLLM has none of its own"),
    ],
)
def test_check_says_whose_class_serves_it(
    kind: Kind, key: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(needs, "check", lambda *_: None)  # vLLM's kernels for GPUs lack such a row
    changed = replace(kimi_linear.FORMAT, native=kimi_linear.NATIVE._replace(key=key))
    monkeypatch.setitem(formats.SERVED, kimi_linear.NAME, changed)
    check(str(FAMILY_GOLDENS / "kimi_k3"), as_json=False)
    assert f"served by     {message}" in capsys.readouterr().out


def test_alice_ai_is_left_where_vllm_has_its_module(
    vllms_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = TINY["alice_ai"] | {"block_attn_res_block_size": 2}
    for module, has_it in (("a_module_of_a_later_vllm", False), ("qwen3_next", True)):
        evidence = native.Native(f"vllm.model_executor.models.{module}")
        changed = replace(alice_ai.FORMAT, native=evidence)
        monkeypatch.setitem(formats.SERVED, alice_ai.NAME, changed)
        assert plugin.is_left_to_vllm(alice, None) == (has_it and vllms_own)


def test_only_what_vllm_has_is_left_to_it(vllms_own: bool) -> None:
    """In the house format the same model is ours everywhere; a plain one is nobody's to claim."""
    house = {"model_type": "attnres_kimi_linear", "attn_res": {"block_size": 4}}
    for config in (KIMI | house, TINY["kimi_linear"], TINY["llama"]):
        assert not plugin.is_left_to_vllm(config, None)


def test_what_is_ours_alone_to_refuse_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has the quantized experts of Kimi K3 on a GPU, which are refused here."""
    plugin.register()
    parser = table["hf"]()
    k3 = K3 | {"quantization_config": {"quant_method": "compressed-tensors"}}
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda *_, **__: (k3, {}))
    with pytest.raises(CheckpointError, match="quantization_config is"):
        parser.parse("m", False)
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    monkeypatch.setattr(type(parser).__base__, "parse", lambda *_, **__: "vLLM's")
    assert parser.parse("m", False) == "vLLM's"


def test_the_setting_is_known_while_a_config_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads config.json before it keeps its additional_config."""
    plugin.register()
    heard: list[Any] = []

    def hear(**_: Any) -> SimpleNamespace:
        heard.append(registry._additional_config.get())
        return SimpleNamespace()

    monkeypatch.setattr("vllm.engine.arg_utils.ModelConfig", hear)
    EngineArgs(model="m", additional_config={settings.NATIVE_KEY: "off"}).create_model_config()
    assert heard == [{settings.NATIVE_KEY: "off"}]
    assert registry._additional_config.get() is None
