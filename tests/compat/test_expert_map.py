"""Experts of several workers on CPU: together they give what one worker gives."""

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from attnres_serve.compat.workarounds import expert_map

EXPERTS, TOP_K, TOKENS = 6, 3, 11


@pytest.fixture
def chosen():
    weights = torch.rand(TOKENS, TOP_K)
    return weights, torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices.int()


def test_workers_share_the_experts(chosen):
    """Every chosen expert has its weight on one worker and 0 on the others."""
    weights, ids = chosen
    result = torch.zeros(TOKENS, EXPERTS)
    for own in ([0, 1, 2], [3, 4, 5]):
        numbers = torch.full((EXPERTS,), -1)
        numbers[own] = torch.arange(len(own))
        local_weights, local = expert_map.local_experts(weights, ids, numbers)
        assert local.dtype == ids.dtype and int(local.min()) >= 0 and int(local.max()) < len(own)
        every = torch.zeros(TOKENS, len(own)).scatter_add(1, local.long(), local_weights)
        result[:, own] += every
    assert torch.equal(result, torch.zeros(TOKENS, EXPERTS).scatter(1, ids.long(), weights))


@pytest.mark.parametrize("on_input", [False, True])
def test_vllms_kernel_is_given_local_experts(chosen, on_input, monkeypatch):
    """Also where the input is weighed: then other workers' experts are left out by a weight."""
    given = {}
    monkeypatch.setattr(
        cpu_moe.CPUUnquantizedExperts, "apply", lambda self, **words: given.update(words)
    )
    expert_map.PATCH.apply()
    patched = cpu_moe.CPUUnquantizedExperts.apply
    expert_map.PATCH.apply()
    assert cpu_moe.CPUUnquantizedExperts.apply is patched  # once only
    weights, ids = chosen
    words = {"topk_weights": weights, "topk_ids": ids, "apply_router_weight_on_input": on_input}
    patched(None, expert_map=None, **words)
    assert given == words | {"expert_map": None}
    patched(None, expert_map=torch.tensor([0, 1, 2, -1, -1, -1]), **words)
    assert given["apply_router_weight_on_input"] is False and int(given["topk_ids"].max()) < 3
    expected = torch.where(ids < 3, torch.ones_like(weights) if on_input else weights, 0)
    assert torch.equal(given["topk_weights"], expected)
