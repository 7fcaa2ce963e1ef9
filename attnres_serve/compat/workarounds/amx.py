"""Permission for AMX, which vLLM's attention in bfloat16 uses without requesting it."""

from attnres_serve.compat import device, host


def permit_amx() -> None:
    """Request AMX from the kernel on processors that have it.

    vLLM's attention in bfloat16 does not request it.  If no matrix product of torch did before, as
    with small models and short prompts, the process ends by an illegal instruction.
    """
    import torch

    if device.is_cpu() and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        host.logger().warning(
            "The operating system refuses AMX, which vLLM's attention in bfloat16 uses: serve with "
            "--dtype float32 if the engine ends by an illegal instruction."
        )
