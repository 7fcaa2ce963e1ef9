"""docs/build/upstream/router-bias-on-cpu.md"""

import torch


def fault() -> bool:
    """An expert whose bias outweighs all scores is not chosen."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    router = CPURouter(top_k=2, global_num_experts=4, e_score_correction_bias=bias)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    _, chosen = router._compute_routing(logits, logits, None)
    return 3 not in chosen
