"""Requests with a ``seed`` beside requests without one, on CPU."""

import pytest
import torch

from attnres_serve.compat.workarounds import seeds_beside_others

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

ROWS, TOKENS, STEPS = 4, 50, 12
LIMITS = {"plain": (None, None), "top_k": (9, None), "top_p": (None, 0.9), "both": (9, 0.9)}


def sampled(logits: torch.Tensor, seeded: list[int], limits: tuple) -> torch.Tensor:
    """The tokens of all rows in every step, ``[steps, rows]``; a row's seed is its number."""
    generators = {row: torch.Generator().manual_seed(row) for row in seeded}
    sampler, rows = TopKTopPSampler(), len(logits)
    k, p = limits
    k = None if k is None else torch.full((rows,), k, dtype=torch.int32)
    p = None if p is None else torch.full((rows,), p)
    return torch.stack([sampler(logits.clone(), generators, k, p)[0] for _ in range(STEPS)])


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
