"""Workarounds for layers that vLLM runs wrongly, or not at all, on CPU."""

from types import SimpleNamespace

import pytest
import torch

from attnres_serve.compat import prepare
from attnres_serve.compat.workarounds import (
    hybrid_prefix_caching,
    mla_backend,
    mla_context,
    rotary,
    zeroed_blocks,
)
from attnres_serve.errors import SettingError

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.compat.faults.hybrid_prefix_caching import Model
from tests.compat.faults.zeroed_blocks import BLOCKS, zero

TOKENS, HEADS, SIZE, NOPE, LATENT = 7, 3, 64, 128, 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_every_head_of_latent_attention_is_rotated(heads: int, neox: bool, dtype) -> None:
    """The shapes and strides that vLLM's latent attention gives the layer."""
    rotary.PATCH.apply()
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(SIZE, SIZE, 128, 10000.0, neox, dtype)
    positions = torch.randperm(100)[:TOKENS]
    whole = torch.randn(TOKENS, heads, NOPE + SIZE).to(dtype)
    latent = torch.randn(TOKENS, LATENT + SIZE).to(dtype)

    def parts() -> tuple[torch.Tensor, torch.Tensor]:
        return whole.clone()[..., NOPE:], latent.clone()[:, LATENT:].unsqueeze(1)

    expected, actual = (
        layer.forward_native(positions, *parts()),
        layer.forward_cpu(positions, *parts()),
    )
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert (expected[0] - parts()[0]).abs().max() > 0.1  # it rotates


@pytest.mark.parametrize("neox", [True, False])
def test_other_calls_go_to_the_operator(neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the faster of the two, and writes to what it is given."""
    rotary.PATCH.apply()
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(SIZE, SIZE, 128, 10000.0, neox, torch.float32)
    positions = torch.randperm(100)[:TOKENS]
    query, key = torch.randn(TOKENS, HEADS * SIZE), torch.randn(TOKENS, SIZE)
    expected = layer.forward_native(positions, query.clone(), key.clone())
    monkeypatch.setattr(RotaryEmbedding, "forward_native", None)
    actual = layer.forward_cpu(positions, query, key)
    assert actual[0] is query and actual[1] is key
    # The same products in another order: a few roundings of 2^-24, of numbers below ten.
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    layer.forward_cpu(positions, query, None)


def test_a_process_of_another_model_keeps_vllms_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", own)
    monkeypatch.setattr(prepare.orphans, "is_process_of_vllm", lambda: True)
    monkeypatch.setattr(prepare.orphans, "end_with_parent", lambda: None)
    prepare.process()
    assert RotaryEmbedding.forward_cpu is own


NEMOTRON, KIMI = "AttnResNemotronHForCausalLM", "AttnResKimiLinearForCausalLM"


@pytest.mark.parametrize(
    ("given", "supported"),
    [
        ((NEMOTRON,), False),
        (("AttnResMamba2ForCausalLM",), False),
        ((KIMI, True), False),
        (("AttnResBailingMoeV2_5ForCausalLM", True), False),
        (("AttnResDeepseekV3ForCausalLM", True), True),
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
    hybrid_prefix_caching.PATCH.apply()
    assert Model(*given).is_prefix_caching_supported is supported


@pytest.mark.parametrize(
    ("architecture", "title"), [(NEMOTRON, "Nemotron-H"), (KIMI, "Kimi Linear")]
)
def test_prefix_caching_that_is_asked_for_is_refused(architecture: str, title: str) -> None:
    """An engine's configuration has it on by now only if it was asked for."""
    config = SimpleNamespace(
        model_config=Model(architecture),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        additional_config={},
        lora_config=None,
        speculative_config=None,
    )
    with pytest.raises(SettingError) as raised:
        prepare.engine(config)
    assert str(raised.value) == (
        f"--enable-prefix-caching is set, and vLLM cannot cache prefixes of {title} on this CPU; "
        "leave it out."
    )
    config.cache_config.enable_prefix_caching = False
    prepare.engine(config)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ((KIMI, True), 512),
        (("AttnResDeepseekV3ForCausalLM", True, (256, 32)), 512),
        # without latent attention, or without AttnRes, the platform's settings stay
        (("AttnResQwen3NextForCausalLM",), 4096),
        (("KimiLinearForCausalLM", True), 4096),
    ],
)
def test_latent_attention_keeps_chunks_and_prefixes(
    given: tuple, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were asked for, where the platform switches them off."""

    def forced(cls, vllm_config) -> None:
        vllm_config.scheduler_config.enable_chunked_prefill = False
        vllm_config.scheduler_config.max_num_batched_tokens = 4096
        vllm_config.cache_config.enable_prefix_caching = False

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(forced))
    mla_context.PATCH.apply()
    mla_context.PATCH.apply()
    for chunks, prefixes in ((True, True), (True, False), (False, False)):
        config = SimpleNamespace(
            model_config=Model(*given),
            scheduler_config=SimpleNamespace(
                enable_chunked_prefill=chunks, max_num_batched_tokens=512
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        )
        CpuPlatform.check_and_update_config(config)
        scheduler = config.scheduler_config
        assert scheduler.max_num_batched_tokens == tokens
        kept = scheduler.enable_chunked_prefill, config.cache_config.enable_prefix_caching
        assert kept == ((chunks, prefixes) if tokens == 512 else (False, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("row", "amx"), [((512, 64), True), ((256, 32), False), ((544, 32), False), ((64, 64), False)]
)
def test_what_kernels_for_amx_do_not_have_is_ours(
    row: tuple, amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    model = Model(KIMI, True, row)
    model.dtype = dtype
    amx = amx and dtype == torch.bfloat16
    drafts = SimpleNamespace(draft_model_config=model, attention_backend=None)
    config = SimpleNamespace(
        model_config=model,
        attention_config=SimpleNamespace(backend=None),
        speculative_config=drafts,
    )
    mla_backend.ask_for_cpu_mla(config)
    mla_backend.compute_every_row()
    selected = SimpleNamespace(use_sparse=False, use_mla=True)
    try:
        for backend in (config.attention_config.backend, drafts.attention_backend):
            result = CpuPlatform.get_attn_backend_cls(backend, selected)
            assert (result == mla_backend.OURS) is not amx
    finally:
        AttentionBackendEnum.CPU_MLA.clear_override()


@pytest.mark.parametrize("latent", ["target", "draft"])
def test_a_draft_of_another_kind_has_a_backend_of_its_own(latent: str) -> None:
    target, draft = (Model(KIMI, latent == one, (64, 64)) for one in ("target", "draft"))
    drafts = SimpleNamespace(draft_model_config=draft, attention_backend=None)
    attention = SimpleNamespace(backend=None)
    mla_backend.ask_for_cpu_mla(
        SimpleNamespace(model_config=target, attention_config=attention, speculative_config=drafts)
    )
    ours = AttentionBackendEnum.CPU_MLA
    expected = (ours, None) if latent == "target" else (None, ours)
    assert (attention.backend, drafts.attention_backend) == expected


def test_a_model_after_one_with_vllms_backend_has_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM remembers its choice for a process."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    selector._cached_get_attn_backend.cache_clear()

    def chosen() -> str:
        with set_current_vllm_config(VllmConfig()):
            result = selector.get_attn_backend(LATENT + SIZE, torch.float32, None, use_mla=True)
        return f"{result.__module__}.{result.__qualname__}"

    assert chosen() == AttentionBackendEnum.CPU_MLA.value
    mla_backend.compute_every_row()
    assert chosen() == mla_backend.OURS


@pytest.mark.parametrize("split", [1, 4, 5])
def test_new_blocks_are_zeroed_and_no_others(split: int) -> None:
    """Blocks of attention, each of some of the kernel's; a layer of states is left alone."""
    zeroed_blocks.PATCH.apply()
    new = [2, 5]
    cache = torch.ones(BLOCKS * split, 16, 8)
    states = zero(cache, split, new)
    kept = cache.view(BLOCKS, -1).all(dim=1)
    assert [block for block in range(BLOCKS) if not kept[block]] == new
    assert cache.sum() == (BLOCKS - len(new)) * split * 16 * 8
    assert states.all()
