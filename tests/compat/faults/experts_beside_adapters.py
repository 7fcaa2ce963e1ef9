"""docs/build/upstream/lora-beside-experts.md"""

import torch


def fault() -> bool:
    """Experts get the Triton kernel on a CPU because other layers have adapters."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    with set_current_vllm_config(VllmConfig()):
        experts = config.FusedMoEConfig(
            num_experts=4,
            experts_per_token=2,
            hidden_dim=32,
            intermediate_size=32,
            num_local_experts=4,
            num_logical_experts=4,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=config.RoutingMethodType.Renormalize,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            is_lora_enabled=True,
        )
        try:
            backend, _ = method.select_unquantized_moe_backend(experts)
        except AttributeError as error:
            if "triton.language" not in str(error):
                raise
            return True
    return backend != UnquantizedMoeBackend.CPU
