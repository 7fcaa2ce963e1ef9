"""docs/build/upstream/expert-parallel-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import torch

WIDTH = 32


def fault() -> bool:
    """A worker of the experts 2 and 3 adds something for tokens of the experts 0 and 1.

    Their numbers are within its own two, so nothing behind them is read.
    """
    of_others = computed(torch.tensor([[0, 1]]), torch.tensor([-1, -1, 0, 1]))
    assert computed(torch.tensor([[0, 1]]), None).any(), "the kernel computes nothing"
    return bool(of_others.any())


def computed(ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """What a worker of two experts adds for tokens of some experts, ``[tokens, WIDTH]``."""
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator).bfloat16()
        return cpu_prepack_moe_weight(made, CPUUnquantizedExperts.isa)

    given: dict[str, Any] = dict.fromkeys(
        ("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
    )
    output = torch.zeros(len(ids), WIDTH).bfloat16()
    layer: Any = SimpleNamespace(
        isa=CPUUnquantizedExperts.isa, w1_bias=None, w2_bias=None, _use_zentorch=False
    )
    CPUUnquantizedExperts.apply(
        layer,
        output=output,
        hidden_states=torch.ones(len(ids), WIDTH).bfloat16(),
        w1=weight(2, 2 * WIDTH, WIDTH),
        w2=weight(2, WIDTH, WIDTH),
        topk_weights=torch.ones(ids.shape),
        topk_ids=ids.int(),
        activation=MoEActivation.SILU,
        global_num_experts=4,
        expert_map=expert_map,
        apply_router_weight_on_input=False,
        **given,
    )
    return output
