"""Expert parallelism on CPU.

vLLM 0.32: ``CPUUnquantizedExperts`` takes a map of experts and hands the global numbers to a kernel
that has this worker's experts alone.  It reads behind them, which ends the worker.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _of_this_worker(original: Any) -> Any:
    """Number experts as this worker does, and weigh those of other workers by 0."""
    import torch

    def apply(self, *, expert_map, **options):  # vLLM's calls are by keywords
        if expert_map is not None:
            if options["apply_router_weight_on_input"]:  # the input is weighed already
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
    """Weights and numbers of experts of one worker, each ``[tokens, top_k]``.

    Args:
        weights, ids: of the chosen experts, by their global numbers.
        expert_map: ``[experts]``, the number on this worker, or -1.
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
