"""docs/build/upstream/rotary-on-cpu.md"""

import torch


def fault() -> bool:
    """Queries ``[tokens, heads, head size]`` are rotated otherwise than by vLLM's torch code."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(64, 64, 128, 10000.0, False, torch.float32)
    positions = torch.arange(3, 10)
    query, latent = torch.randn(7, 3, 192), torch.randn(7, 576)

    def parts() -> tuple[torch.Tensor, torch.Tensor]:
        return query.clone()[..., 128:], latent.clone()[:, 512:].unsqueeze(1)

    wanted = layer.forward_native(positions, *parts())
    found = layer.forward_cpu(positions, *parts())
    # The same products in another order differ by a few roundings of 2^-24, of numbers below ten.
    return any((a - b).abs().max() > 1e-5 for a, b in zip(found, wanted, strict=True))
