"""Requests with a ``seed`` beside requests without one, on CPU.

vLLM 0.28: the sampler leaves every seed out where one request of a batch has none.
This can go with the support of vLLM 0.28.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _keeping_seeds(original: Any) -> Any:
    """Sample by vLLM's function for any device where a request has a seed."""

    def __call__(self, logits, generators, k, p):
        if generators:
            return self.forward_native(logits, generators, k, p)
        return original(self, logits, generators, k, p)

    return __call__


PATCH = Patch(
    # A sampler is there before a model is, and has kept its own ``forward``.
    targets=("vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__call__",),
    make=_keeping_seeds,
    why="seeds were left out beside requests without one",
    models="AttnRes models on CPU",
    first=(0, 28),
    last=(0, 28),
)
