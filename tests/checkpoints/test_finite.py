"""Numbers that are not finite are found in tensors of any shape and type, and told by place."""

import math

import pytest
import torch

from attnres_serve.checkpoints.finite import check_finite
from attnres_serve.errors import CheckpointError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite(
    dtype: torch.dtype, shape: tuple[int, ...], value: float
) -> None:
    if dtype == torch.float8_e4m3fn:
        value = math.nan  # it has no infinities
    tensor = torch.ones(shape).to(dtype)
    check_finite("w", tensor, torch.float16)
    tensor.view(-1)[-1:] = value
    place = f" at \\[{', '.join(str(size - 1) for size in shape)}\\]" if shape else ""
    message = rf"the tensor w holds -?(nan|inf){place}, and 1 of its {math.prod(shape)} numbers are"
    for target in (None, torch.float32, torch.float16):
        with pytest.raises(CheckpointError, match=message):
            check_finite("w", tensor, target)


@pytest.mark.parametrize(
    ("value", "stored", "served", "fits"),
    [
        (70000.0, torch.float32, torch.float16, False),
        (-70000.0, torch.bfloat16, torch.float16, False),
        (65519.0, torch.float32, torch.float16, True),  # rounds down to the largest, 65504
        (70000.0, torch.bfloat16, torch.float32, True),
        (1e300, torch.float64, torch.float32, False),
        (3.4e38, torch.float32, torch.bfloat16, False),
    ],
)
def test_a_number_beyond_the_type_that_it_is_cast_to(
    value: float, stored: torch.dtype, served: torch.dtype, fits: bool
) -> None:
    tensor = torch.zeros(4, 2, dtype=stored)
    tensor[2, 1] = value
    check_finite("w", tensor)
    if fits:
        check_finite("w", tensor, served)
        return
    kind = str(served).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"at \[2, 1\], which is beyond {kind}, .* --dtype"):
        check_finite("w", tensor, served)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 4),
        torch.tensor([2**31 - 1]),
        torch.tensor([True]),
        torch.empty(3, device="meta"),
    ],
    ids=str,
)
def test_nothing_that_could_be_wrong(tensor: torch.Tensor) -> None:
    check_finite("w", tensor, torch.float16)
