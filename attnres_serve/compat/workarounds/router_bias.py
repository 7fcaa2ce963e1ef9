"""The correction bias of softmax routers on CPU.

vLLM 0.32: ``CPURouter`` ignores the bias for softmax scores and experts without groups, so it
chooses other experts than on a GPU.  Ernie 4.5 MoE is such a model.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _corrected(original: Any) -> Any:
    """Choose experts by score and bias, and weight them by score.

    All other calls go to vLLM's code.
    """

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        bias = self.e_score_correction_bias
        is_left_out = not self.use_grouped_topk and self.custom_routing_function is None
        if bias is None or self.scoring_func != "softmax" or not is_left_out:
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return biased_top_k(router_logits, bias, self.top_k, self.renormalize)

    return _compute_routing


def biased_top_k(logits: Any, bias: Any, top_k: int, renormalize: bool) -> tuple[Any, Any]:
    """Weights and numbers of the chosen experts, each ``[tokens, top_k]``.

    Args:
        logits: ``[tokens, experts]``.
        bias: ``[experts]``.
        top_k: experts for a token.
        renormalize: whether the weights sum to 1.
    """
    import torch

    scores = logits.float().softmax(-1)
    chosen = (scores + bias).topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen.to(torch.int32)


PATCH = Patch(
    targets=("vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter._compute_routing",),
    make=_corrected,
    why="the bias of softmax routers was left out",
    models="AttnRes models on CPU",
    first=(0, 30),
    report="router-bias-on-cpu",
)
