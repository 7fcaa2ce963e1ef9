"""Requests with a ``seed`` beside requests without one, on CPU.

vLLM 0.28: the sampler ignores all seeds if one request of a batch has none.
Remove this with the support for vLLM 0.28.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _keeping_seeds(original: Any) -> Any:
    """Use vLLM's sampling function for all devices if a request has a seed."""

    def __call__(self, logits, generators, k, p):
        if generators:
            return self.forward_native(logits, generators, k, p)
        return original(self, logits, generators, k, p)

    return __call__


PATCH = Patch(
    # A sampler is made before the model, and has already bound ``forward``.
    targets=("vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__call__",),
    make=_keeping_seeds,
    why="seeds were left out beside requests without one",
    models="AttnRes models on CPU",
    first=(0, 28),
    last=(0, 28),
)
