"""A compiler at rest, for tests that compile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config
import torch._inductor.config


def reset_compiler() -> None:
    """Forget what was compiled, and let what other tests left end before the next compilation.

    A linear layer of vLLM's on CPU reads a tensor where it ends (``CPUDNNLGEMMHandler.__del__``).
    A model is garbage with cycles, which Python collects at any time.  In the middle of tracing the
    compiler would take that reading for a part of what it traces, and fail.
    """
    gc.collect()
    torch.compiler.reset()


@contextmanager
def lowered_anew() -> Iterator[None]:
    """Put graphs in order and write their code without a cache.

    What compiles that code may have the same from before, which saves seconds for each graph.
    """
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
