"""Torch's first call of a vector function, which several threads must not make at once."""

import pytest
import torch
from commands import python
from torch.utils._python_dispatch import TorchDispatchMode

from attnres_serve import plugin
from attnres_serve.compat.workarounds import torch_vector_math


class Calls(TorchDispatchMode):
    """The operations on a single element of a dtype."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.made.add((function.overloadpacket.__name__, args[0].dtype))
        return result


def test_registering_settles_the_functions_of_a_rotary_table():
    """The plugin is loaded by every process of vLLM's before it builds a model."""
    with Calls() as calls:
        plugin.register()
    expected = {
        (f.__name__, d) for f in torch_vector_math.FUNCTIONS for d in (torch.float32, torch.float64)
    }
    assert {("cos", torch.float32), ("sin", torch.float32)} < expected <= calls.made


FIRST_CALLS = """
import torch
from attnres_serve.compat.workarounds import torch_vector_math
torch.set_num_threads(2)
torch_vector_math.settle()
angles = torch.einsum("i,j->ij", torch.arange(256.0), 10000.0 ** -(torch.arange(16.0) / 16))
for function in (torch.cos, torch.sin):
    error = (function(angles) - function(angles.double())).abs().max().item()
    assert error < 1e-7, (function.__name__, error)
"""


@pytest.mark.exhaustive
def test_first_calls_of_many_processes_are_exact():
    """Without the mend about 3 of 100 err by 1.5e-4; a float32 cosine may by a unit, 2^-24."""
    for _ in range(100):
        python(FIRST_CALLS)
