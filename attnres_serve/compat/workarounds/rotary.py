"""Rotary embeddings on CPU for queries with a dimension of their own for heads.

vLLM 0.28 to 0.33: ``RotaryEmbedding.forward_cpu`` calls an operator that takes the last dimension
of a query for all heads together.  Latent attention (DeepSeek-V2, Moonlight, GLM-4-MoE-Lite) and
LFM2 give it ``[tokens, heads, head size]``: the operator rotates one head a token, and the wrong
one, and the model's answers are wrong.  This happens in eager mode without yarn; compiled models
and yarn have code of their own.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _every_head(by_operator: Any) -> Any:
    """Let vLLM's own torch code rotate the tensors that its operator misreads.

    All other calls go to the operator as before.  To be applied before a model is built: a layer
    binds the method when it is made.
    """

    def forward_cpu(self, positions, query, key=None):
        flat = positions.dim() + 1  # the shape of the positions, and one dimension for all heads
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
