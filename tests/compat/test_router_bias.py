"""The correction bias of softmax routers on CPU."""

import pytest
import torch

from attnres_serve.compat.workarounds import router_bias

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

TOKENS, EXPERTS, TOP_K = 50, 8, 3


def chosen(router: CPURouter, logits: torch.Tensor) -> torch.Tensor:
    """The weight of every expert."""
    weights, experts = router._compute_routing(logits, logits, None)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    return torch.zeros(TOKENS, EXPERTS).scatter_(1, experts.long(), weights)


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_are_chosen_by_score_and_bias(renormalize: bool) -> None:
    """And weighed by score alone, as Hugging Face's Ernie 4.5 MoE does."""
    router_bias.PATCH.apply()
    logits, bias = torch.randn(TOKENS, EXPERTS), torch.rand(EXPERTS)
    actual = chosen(
        CPURouter(TOP_K, EXPERTS, renormalize=renormalize, e_score_correction_bias=bias), logits
    )
    scores = logits.softmax(-1)
    best = (scores + bias).topk(TOP_K).indices
    expected = torch.zeros_like(scores).scatter_(1, best, scores.gather(1, best))
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(actual, expected)


def test_routers_without_a_bias_are_vllms_own() -> None:
    router_bias.PATCH.apply()
    logits = torch.randn(TOKENS, EXPERTS)
    actual = chosen(CPURouter(TOP_K, EXPERTS), logits)
    best = logits.topk(TOP_K)
    expected = torch.zeros_like(logits).scatter_(1, best.indices, best.values.softmax(-1))
    torch.testing.assert_close(actual, expected)
