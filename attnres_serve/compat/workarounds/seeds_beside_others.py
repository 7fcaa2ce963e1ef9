"""Requests with a ``seed`` beside requests without one, on CPU.

vLLM 0.28: the sampler leaves every seed out where one request of a batch has none.
This can go with the support of vLLM 0.28.
"""

from typing import Any

from attnres_serve.compat import versions

RIGHT_SINCE = (0, 29)


def keep_seeds() -> None:
    """Sample by vLLM's function for any device where a request has a seed (idempotent)."""
    if not versions.is_older_than(RIGHT_SINCE):
        return
    from torch import nn
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    def __call__(self, logits, generators, k, p):
        if generators:
            return self.forward_native(logits, generators, k, p)
        return nn.Module.__call__(self, logits, generators, k, p)

    # A sampler is there before a model is, and has kept its own ``forward``.
    sampler: Any = TopKTopPSampler
    sampler.__call__ = __call__
