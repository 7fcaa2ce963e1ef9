"""A compiler at rest, for tests that compile."""

import gc

import torch


def reset_compiler() -> None:
    """Forget what was compiled, and let what other tests left end before the next compilation.

    A linear layer of vLLM's on CPU reads a tensor where it ends (``CPUDNNLGEMMHandler.__del__``).
    A model is garbage with cycles, which Python collects at any time.  In the middle of tracing the
    compiler would take that reading for a part of what it traces, and fail.
    """
    gc.collect()
    torch.compiler.reset()
