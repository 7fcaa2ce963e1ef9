"""A request's ``seed`` beside a request without one."""

import torch

STEPS = 12


def fault() -> bool:
    """A request with a seed gets other tokens beside one without than it gets alone."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    logits = torch.randn(2, 50)
    alone = sampled(logits[:1], [0], (None, None))[:, 0]
    return not sampled(logits, [0], (None, None))[:, 0].equal(alone)


def sampled(logits: torch.Tensor, seeded: list[int], limits: tuple) -> torch.Tensor:
    """The tokens of all rows in every step, ``[steps, rows]``; a row's seed is its number."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    generators = {row: torch.Generator().manual_seed(row) for row in seeded}
    sampler, rows = TopKTopPSampler(), len(logits)
    k, p = limits
    k = None if k is None else torch.full((rows,), k, dtype=torch.int32)
    p = None if p is None else torch.full((rows,), p)
    return torch.stack([sampler(logits.clone(), generators, k, p)[0] for _ in range(STEPS)])
