"""Inductor's scheduler, which can read a buffer before the operation that fills it."""

from typing import Any

from attnres_serve.compat.patch import Patch
from attnres_serve.kernels import fingerprint


def _keeping_order(recompute: Any) -> Any:
    """Fix inductor's scheduler, which can read a buffer before the operation that fills it.

    torch 2.13: when the C++ backend fuses loops of one and two dimensions, it recomputes a node's
    reads and forgets that they are of a later version of a buffer.  vLLM's matrix products on CPU
    write into such buffers, so a site could add uninitialised memory instead of a sublayer's
    output.  Apply this before anything is compiled.
    """
    import torch

    def recompute_size_and_body(self, *args, **kwargs) -> None:
        recompute(self, *args, **kwargs)
        if renames := getattr(self, "mutation_renames", None):
            self.set_read_writes(self.read_writes.rename(renames))

    torch.compiler.config.cache_key_tag += fingerprint.source()
    return recompute_size_and_body


PATCH = Patch(
    targets=("torch._inductor.scheduler:SchedulerNode.recompute_size_and_body",),
    make=_keeping_order,
    why="a buffer could be read before it was filled",
    models="compiled AttnRes models",
    first=(2, 13),
)
