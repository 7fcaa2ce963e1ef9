"""AMX, which vLLM's attention in bfloat16 uses without asking the kernel for it."""

from attnres_serve.compat import device, host


def permit_amx() -> None:
    """Ask the kernel for AMX on processors that have it.

    vLLM's attention in bfloat16 uses it without asking.  A process in which no matrix product of
    torch's asked before, as with small models and short prompts, ends by an illegal instruction.
    """
    import torch

    if device.is_cpu() and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        host.logger().warning(
            "The operating system refuses AMX, which vLLM's attention in bfloat16 uses: serve with "
            "--dtype float32 if the engine ends by an illegal instruction."
        )
