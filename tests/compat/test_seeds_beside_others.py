"""Requests with a ``seed`` beside requests without one, on CPU."""

import pytest
import torch

from attnres_serve.compat.workarounds import seeds_beside_others

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from tests.compat.faults.seeds_beside_others import sampled

ROWS, TOKENS = 4, 50
LIMITS = {"plain": (None, None), "top_k": (9, None), "top_p": (None, 0.9), "both": (9, 0.9)}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("seeded", [[0], [0, 2], [0, 1, 2, 3]])
def test_a_seed_gives_the_same_tokens_beside_any_requests(
    seeded: list[int], limits: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopKTopPSampler, "__call__", TopKTopPSampler.__call__)
    seeds_beside_others.PATCH.apply()
    current_platform.import_kernels()
    logits = torch.randn(ROWS, TOKENS)
    alone = sampled(logits[:1], [0], limits)[:, 0]
    assert len(set(alone.tolist())) > 1
    assert sampled(logits, seeded, limits)[:, 0].equal(alone)
