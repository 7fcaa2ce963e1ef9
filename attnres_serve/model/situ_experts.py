"""Experts with the activation of Kimi K3 on CPU, through vLLM's hook for external operators.

vLLM's experts on CPU are compiled with other activations.  All other experts stay vLLM's.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as stock
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.utils.torch_utils import direct_register_custom_op

from attnres_serve.compat import host
from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.experts import situ_experts

NAME = "UnquantizedFusedMoEMethod"


def replace() -> None:
    """Let vLLM build the method of this module instead of vLLM's (idempotent); for CPUs."""
    if NAME not in op_registry_oot:
        CustomOp.register_oot(UnquantizedFusedMoEMethod, name=NAME)


@functools.cache
def load(dtype: torch.dtype) -> None:
    """Load the C++ experts of a dtype; log a warning if they cannot be loaded."""
    if (problem := cpp.problem(dtype)) is not None:
        host.logger().warning("experts run in plain torch, which is slow: %s", problem)


class SituExperts(CPUUnquantizedExperts):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weights unpacked: only vLLM's kernel needs them packed."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        expert_map: Tensor | None,
        **rest: Any,
    ) -> None:
        ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        config = self.moe_config
        betas = config.activation_situ_beta, config.activation_situ_linear_beta
        experts = torch.ops.vllm.attnres_situ_experts  # opaque to a compiler
        output.copy_(experts(hidden_states, w1, w2, topk_weights, ids, *betas))


class UnquantizedFusedMoEMethod(stock.UnquantizedFusedMoEMethod):
    def __init__(self, moe: Any) -> None:
        if moe.activation != MoEActivation.SITU:
            super().__init__(moe)
            return
        # Not vLLM's __init__, which has no experts for SITU.
        super(stock.UnquantizedFusedMoEMethod, self).__init__(moe)
        load(moe.in_dtype)
        self.unquantized_backend = stock.UnquantizedMoeBackend.CPU
        self.experts_cls = SituExperts
        self.supports_pre_processed_weights = True


def _empty(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


direct_register_custom_op("attnres_situ_experts", situ_experts, fake_impl=_empty)
