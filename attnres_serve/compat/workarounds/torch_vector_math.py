"""A fault of torch on CPU, mended: the first call of a function may be of low precision.

torch hands elementwise functions of contiguous tensors to MKL, which chooses a function's kernel at
its first call.  Where two threads make that call at once, one may run a kernel of low accuracy:
errors of 1.5e-4 in a float32 cosine (https://github.com/pytorch/pytorch/issues/188792).  A server
computes its table of rotary embeddings by such a first call, once, and keeps it: in about one start
out of thirty the positions of one thread, half of them all, were wrong as long as it ran.
"""

import torch

# What models and samplers call; the choice is made for each function and dtype by itself.
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
    """Have the choice made by this thread alone: a call on one element is not shared by threads."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            function(one)
