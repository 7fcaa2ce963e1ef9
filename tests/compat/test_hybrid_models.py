"""Workarounds for layers that vLLM runs wrongly, or not at all, on CPU."""

from types import SimpleNamespace

import pytest
import torch

from attnres_serve.compat import prepare
from attnres_serve.compat.workarounds import hybrid_prefix_caching, mla_blocks, rotary
from attnres_serve.errors import SettingError

pytest.importorskip("vllm")

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

TOKENS, HEADS, SIZE, NOPE, LATENT = 7, 3, 64, 128, 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_every_head_of_latent_attention_is_rotated(heads: int, neox: bool, dtype) -> None:
    """The shapes and strides that vLLM's latent attention gives the layer."""
    rotary.rotate_every_head()
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(SIZE, SIZE, 128, 10000.0, neox, dtype)
    positions = torch.randperm(100)[:TOKENS]
    whole = torch.randn(TOKENS, heads, NOPE + SIZE).to(dtype)
    latent = torch.randn(TOKENS, LATENT + SIZE).to(dtype)

    def parts() -> tuple[torch.Tensor, torch.Tensor]:
        return whole.clone()[..., NOPE:], latent.clone()[:, LATENT:].unsqueeze(1)

    wanted, found = (
        layer.forward_native(positions, *parts()),
        layer.forward_cpu(positions, *parts()),
    )
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert (wanted[0] - parts()[0]).abs().max() > 0.1  # it rotates


@pytest.mark.parametrize("neox", [True, False])
def test_other_calls_go_to_the_operator(neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the faster of the two, and writes to what it is given."""
    rotary.rotate_every_head()
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(SIZE, SIZE, 128, 10000.0, neox, torch.float32)
    positions = torch.randperm(100)[:TOKENS]
    query, key = torch.randn(TOKENS, HEADS * SIZE), torch.randn(TOKENS, SIZE)
    wanted = layer.forward_native(positions, query.clone(), key.clone())
    monkeypatch.setattr(RotaryEmbedding, "forward_native", None)
    found = layer.forward_cpu(positions, query, key)
    assert found[0] is query and found[1] is key
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    layer.forward_cpu(positions, query, None)


def test_a_process_of_another_model_keeps_vllms_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", own)
    monkeypatch.setattr(prepare.orphans, "is_process_of_vllm", lambda: True)
    monkeypatch.setattr(prepare.orphans, "end_with_parent", lambda: None)
    prepare.process()
    assert RotaryEmbedding.forward_cpu is own


def test_blocks_of_latent_attention_are_multiples_of_the_kernels() -> None:
    """A hybrid model's block is 128 tokens or more."""
    mla_blocks.accept_multiples()
    accepted = [b for b in (None, 16, 24, 128, 144, 200) if CPUMLABackend.supports_block_size(b)]
    assert accepted == [None, 16, 128, 144]
    assert CPUMLABackend.get_supported_kernel_block_sizes() == [mla_blocks.KERNEL_BLOCK]


NEMOTRON, KIMI = "AttnResNemotronHForCausalLM", "AttnResKimiLinearForCausalLM"


class Model(ModelConfig):
    """vLLM's configuration of a model that generates, as far as it is asked."""

    pooler_config = None

    def __init__(self, architecture: str, mla: bool = False) -> None:
        self.hf_config = SimpleNamespace(architectures=[architecture])
        self.mla = mla

    is_hybrid = property(lambda self: True)
    use_mla = property(lambda self: self.mla)


@pytest.mark.parametrize(
    ("given", "supported"),
    [
        ((NEMOTRON,), False),
        (("AttnResMamba2ForCausalLM",), False),
        ((KIMI, True), False),
        (("AttnResQwen3NextForCausalLM",), True),
        (("AttnResLfm2ForCausalLM",), True),
        # without AttnRes vLLM's answer stays as it is
        (("NemotronHForCausalLM",), True),
        (("KimiLinearForCausalLM", True), True),
    ],
)
def test_prefix_caching_is_off_by_default_where_it_cannot_run(
    given: tuple, supported: bool
) -> None:
    hybrid_prefix_caching.off_by_default()
    assert Model(*given).is_prefix_caching_supported is supported


@pytest.mark.parametrize(
    ("given", "title"), [((NEMOTRON,), "Nemotron-H"), ((KIMI, True), "Kimi Linear")]
)
def test_prefix_caching_that_is_asked_for_is_refused(
    given: tuple, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's configuration has it on by now only if it was asked for."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    config = SimpleNamespace(
        model_config=Model(*given),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    with pytest.raises(SettingError) as raised:
        prepare.engine(config)
    assert str(raised.value) == (
        f"--enable-prefix-caching is set, and vLLM cannot cache prefixes of {title} on this CPU; "
        "leave it out."
    )
    config.cache_config.enable_prefix_caching = False
    prepare.engine(config)


def test_latent_attention_with_amx_keeps_prefix_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend for AMX can continue a cached prefix."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert Model(KIMI, True).is_prefix_caching_supported
    assert not Model(NEMOTRON).is_prefix_caching_supported
