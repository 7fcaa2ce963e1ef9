"""Expert parallelism on CPU.

vLLM 0.32: ``CPUUnquantizedExperts`` ignores the map of experts and passes global numbers to a
kernel that has only this worker's experts.  It reads beyond them, which ends the worker.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _of_this_worker(original: Any) -> Any:
    """Use this worker's numbers of experts, and weight 0 for other workers' experts."""
    import torch

    def apply(self, *, expert_map, **options):  # vLLM's calls are by keywords
        if expert_map is not None:
            if options["apply_router_weight_on_input"]:  # the input is already weighted
                options |= {
                    "topk_weights": torch.ones_like(options["topk_weights"]),
                    "apply_router_weight_on_input": False,
                }
            options["topk_weights"], options["topk_ids"] = local_experts(
                options["topk_weights"], options["topk_ids"], expert_map
            )
        original(self, expert_map=None, **options)

    return apply


def local_experts(weights: Any, ids: Any, expert_map: Any) -> tuple[Any, Any]:
    """Weights and local numbers of one worker's experts, each ``[tokens, top_k]``.

    Args:
        weights, ids: weights and global numbers of the chosen experts.
        expert_map: ``[experts]``, the local number, or -1.
    """
    local = expert_map[ids.long()]
    return weights * (local >= 0), local.clamp(min=0).to(ids.dtype)


PATCH = Patch(
    targets=("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",),
    make=_of_this_worker,
    why="expert parallelism read other workers' experts",
    models="AttnRes models on CPU",
    first=(0, 30),
    report="expert-parallel-on-cpu",
)
