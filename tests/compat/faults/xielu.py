"""docs/build/upstream/xielu-in-bfloat16.md"""

import torch


def fault() -> bool:
    """The activation of a float32 model differs from float32's by more than rounding."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import XIELU

    assert torch.get_default_dtype() == torch.float32
    with set_current_vllm_config(VllmConfig()):
        layer, exact = XIELU(), XIELU(dtype=torch.float32)
    x = torch.linspace(-4, 4, 8)
    with torch.no_grad():
        exact.alpha_p.copy_(layer.alpha_p)
        exact.alpha_n.copy_(layer.alpha_n)
        ratio = layer.forward_native(x) / exact.forward_native(x)
    return bool((ratio - 1).abs().max() > 1e-5)  # float32 rounds by 6e-8, bfloat16 by 4e-3
