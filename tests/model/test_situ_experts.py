"""Experts with Kimi K3's activation on several workers."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from attnres_serve.kernels.experts import situ_experts as whole
from attnres_serve.model import situ_experts

BETAS = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "latent", "width"),
    [(1, 4, 1, 8, 4), (7, 5, 4, 6, 10), (40, 3, 2, 32, 16)],
)
def test_workers_add_up_to_all_experts(tokens, count, top_k, latent, width) -> None:
    draw = torch.Generator().manual_seed(tokens)
    shapes = (tokens, latent), (count, 2 * width, latent), (count, latent, width)
    x, gate_up, down = (torch.randn(shape, generator=draw) for shape in shapes)
    shares = torch.rand(tokens, top_k, generator=draw)
    ids = torch.rand(tokens, count, generator=draw).argsort()[:, :top_k]
    parts = torch.zeros_like(x)
    for chosen in ([0], [*range(1, count)]):
        local = torch.full((count,), -1)
        local[chosen] = torch.arange(len(chosen))
        experts = object.__new__(situ_experts.SituExperts)
        experts.moe_config = SimpleNamespace(**BETAS)
        out = torch.empty_like(x)
        given = {"topk_weights": shares, "topk_ids": ids.int(), "expert_map": local}
        experts.apply(output=out, hidden_states=x, w1=gate_up[chosen], w2=down[chosen], **given)
        parts += out
    torch.testing.assert_close(whole(x, gate_up, down, shares, ids, *BETAS.values()), parts)


def test_experts_load_the_kernels_of_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all layers; without them the numbers are the same, and slow."""
    asked: list[torch.dtype] = []
    situ_experts.load.cache_clear()
    monkeypatch.setattr(situ_experts.cpp, "problem", asked.append)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        moe = SimpleNamespace(activation=MoEActivation.SITU, in_dtype=dtype)
        with set_current_vllm_config(VllmConfig()):
            situ_experts.UnquantizedFusedMoEMethod(moe)
    situ_experts.load.cache_clear()
    assert asked == [torch.bfloat16, torch.float32]
