"""Inductor's scheduler, which can read a buffer before the operation that fills it."""

from typing import Any

from attnres_serve.kernels import fingerprint


def keep_order_of_mutations() -> None:
    """Mend inductor's scheduler, which can read a buffer before the operation that fills it.

    torch 2.13: where the C++ backend fuses loops of one and of two dimensions, it computes a node's
    reads anew and forgets that they are of a later version of a buffer.  vLLM's matrix products on
    CPU write into such buffers, so a site could add what memory held before a sublayer's output was
    there.  Called where a model is built, before anything is compiled (idempotent).
    """
    import torch
    from torch._inductor.scheduler import SchedulerNode

    recompute: Any = getattr(SchedulerNode, "recompute_size_and_body", None)
    if recompute is None or getattr(recompute, "keeps_order_of_mutations", False):
        return

    def recompute_size_and_body(self, *args, **kwargs) -> None:
        recompute(self, *args, **kwargs)
        if renames := getattr(self, "mutation_renames", None):
            self.set_read_writes(self.read_writes.rename(renames))

    recompute_size_and_body.keeps_order_of_mutations = True  # type: ignore[attr-defined]
    SchedulerNode.recompute_size_and_body = recompute_size_and_body
    torch.compiler.config.cache_key_tag += fingerprint.source()
