"""A fix for a fault of torch on CPU: the first call of a function may have low precision.

torch passes elementwise functions of contiguous tensors to MKL, which chooses a function's kernel
at its first call.  If two threads make that call at the same time, one may run a kernel of low
accuracy: errors of 1.5e-4 in a float32 cosine (https://github.com/pytorch/pytorch/issues/188792).
A server computes its table of rotary embeddings once with such a first call: in about one of
thirty starts one thread's positions, half of all, were wrong for the life of the server.
"""

import torch

# Functions of models and samplers; the choice is made for each function and dtype.
FUNCTIONS = (
    torch.cos,
    torch.sin,
    torch.exp,
    torch.expm1,
    torch.log,
    torch.log1p,
    torch.sqrt,
    torch.tanh,
    torch.erf,
)


def settle() -> None:
    """Make the choice in this thread: a call with one element is not split over threads."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            function(one)
