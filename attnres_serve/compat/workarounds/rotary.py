"""Rotary embeddings on CPU for queries with a separate dimension for heads.

vLLM 0.28 to 0.33: ``RotaryEmbedding.forward_cpu`` calls an operator that treats the last dimension
of a query as all heads together.  Latent attention (DeepSeek-V2, Moonlight, GLM-4-MoE-Lite) and
LFM2 pass ``[tokens, heads, head size]``: the operator rotates only one head per token, and the
wrong one, so the model's answers are wrong.  This happens in eager mode without yarn; compiled
models and yarn use other code.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _every_head(by_operator: Any) -> Any:
    """Rotate the tensors that the operator misreads with vLLM's torch code.

    All other calls go to the operator.  Apply this before a model is built, because layers bind the
    method when they are made.
    """

    def forward_cpu(self, positions, query, key=None):
        flat = positions.dim() + 1  # dimensions of the positions, and one for all heads
        if query.dim() == flat and (key is None or key.dim() == flat):
            return by_operator(self, positions, query, key)
        return self.forward_native(positions, query, key)

    return forward_cpu


PATCH = Patch(
    targets=("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",),
    make=_every_head,
    why="some queries were rotated wrongly",
    models="AttnRes models on CPU",
    first=(0, 28),
    report="rotary-on-cpu",
)
