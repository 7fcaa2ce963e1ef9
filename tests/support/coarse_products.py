"""vLLM's linear layers where they lose more than their format does, as on some processors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

BITS = 8  # of a bfloat16, the first one included


@contextmanager
def coarse_products(fewer: int) -> Iterator[None]:
    """Let them round what they give to so many bits less than bfloat16 has; none: as they are."""
    apply = UnquantizedLinearMethod.apply

    def coarse(*given, **named) -> Tensor:
        found = apply(*given, **named)
        mantissa, exponent = torch.frexp(found.float())
        steps = 2.0 ** (BITS - fewer)
        return torch.ldexp((mantissa * steps).round() / steps, exponent).to(found.dtype)

    if fewer:
        UnquantizedLinearMethod.apply = coarse
    try:
        yield
    finally:
        UnquantizedLinearMethod.apply = apply
