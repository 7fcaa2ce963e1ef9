"""What the Triton kernels' functions refuse, and that they launch nothing then or for no tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_cases import Spy, floats, valid, zeros
from triton_interpreter import DEVICE, ON_GPU

from attnres_serve.kernels.triton import common
from attnres_serve.kernels.triton import phase_1 as triton_phase_1
from attnres_serve.kernels.triton import single_pass as triton_single_pass
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import phase_1
from attnres_serve.kernels.triton.phase_2 import phase_2
from attnres_serve.kernels.triton.single_pass import single_pass

pytestmark = pytest.mark.usefixtures("interpreter")


def half(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.float16)


def sized(hidden: int) -> dict[str, torch.Tensor]:
    return {"delta": zeros(1, hidden), "bank": zeros(1, 4, hidden)}


def of_type(dtype: torch.dtype, name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {name: zeros(*shape, dtype=dtype)}


def elsewhere(name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.empty(*shape, device="meta")}


# The class of the error is TypeError for a dtype that is none of a kernel's, else ValueError.
OF_A_SITE: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: {"delta": zeros(4, 1, 96)},
        r"delta must be \[tokens, hidden\] and bank \[tokens, slots, hidden\], not \[4, 1, 96\]",
    ),
    (lambda: {"bank": zeros(3, 5, 96)}, r"bank \[3, 5, 96\] does not fit delta"),
    (lambda: {"bank": zeros(4, 5, 95)}, "does not fit delta"),
    (lambda: sized(0), "hidden size 0 is outside"),
    (lambda: sized(MAX_HIDDEN + 1), f"size {MAX_HIDDEN + 1} is outside 1..{MAX_HIDDEN}"),
    (lambda: {"row": 5}, "row 5 is outside the 5 slots of the bank"),
    (lambda: {"row": -1}, "row -1 is outside"),
    (lambda: of_type(torch.int32, "delta", 4, 96), "^delta is torch.int32, not"),
    (lambda: of_type(torch.float64, "delta", 4, 96), "^delta is torch.float64, not"),
    (lambda: {"bank": half(4, 5, 96)}, "^bank is torch.float16 but delta is torch.bfloat16"),
    (lambda: {"query": zeros(96)}, "^query is torch.bfloat16; it is folded"),
    (lambda: {"query": floats(95)}, r"query is \[95\], not \[96\]"),
    (lambda: {"bias": floats(3)}, r"bias is \[3\] torch.float32, not \[4\] torch.float32"),
    (lambda: {"bias": zeros(4)}, r"bias is \[4\] torch.bfloat16, not"),
    (lambda: elsewhere("bias", 4), f"bias is on meta but delta on {DEVICE}"),
    (lambda: of_type(torch.int8, "norm_weight", 96), "^norm_weight is torch.int8, not"),
    (lambda: {"norm_weight": zeros(1, 96)}, r"norm_weight is \[1, 96\], not \[96\]"),
    (lambda: elsewhere("query", 96), f"query is on meta but delta on {DEVICE}"),
    (lambda: {"delta": zeros(4, 192)[:, ::2]}, "delta must have unit stride"),
    (lambda: {"bank": zeros(4, 5, 192)[..., ::2]}, "bank must have unit stride"),
    (lambda: {"query": floats(192)[::2]}, "query must have unit stride"),
    (lambda: {"bank": zeros(1, 5, 96).expand(4, 5, 96)}, "bank is written and its rows overlap"),
    (
        lambda: {"bank": zeros(4 * 5 * 96).as_strided((4, 5, 96), (480, 95, 1))},
        "bank is written and its rows overlap",
    ),
]
OF_A_GROUP: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"queries": floats(96)}, r"queries must be \[sites, hidden\], not \[96\]"),
    (lambda: {"queries": floats(0, 96)}, r"must be \[sites, hidden\], not \[0, 96\]"),
    (lambda: {"queries": zeros(3, 96)}, "^queries is torch.bfloat16; it is"),
    (lambda: {"queries": floats(3, 95)}, r"queries is \[3, 95\], not \[3, 96\]"),
    (lambda: {"queries": floats(3, 192)[:, ::2]}, "must have unit stride"),
    (lambda: {"biases": floats(3, 3)}, r"bias is \[3, 3\] torch.float32, not \[3, 4\]"),
    (lambda: {"biases": floats(2, 4)}, r"bias is \[2, 4\] torch.float32, not \[3, 4\]"),
    (lambda: {"bank": zeros(3, 5, 96)}, "does not fit delta"),  # and the rest of a site
    (
        lambda: {"row": 0, "completes": False},
        "row 0 is a partial sum, so later sites have no finished block",
    ),
]
OF_A_MERGE: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: {"answers": half(2, 4, 96)},
        r"answers is \[2, 4, 96\] torch.float16, not \[2, 4, 96\] torch.bfloat16",
    ),
    (lambda: {"answers": zeros(2, 3, 96)}, r"answers is \[2, 3, 96\]"),
    (lambda: {"answers": zeros(4, 96)}, r"must be \[sites, tokens, hidden\], not \[4, 96\]"),
    (lambda: {"answers": zeros(2, 4, 192)[..., ::2]}, "answers must have unit stride"),
    (lambda: {"log_sums": zeros(2, 4)}, r"log_sums is \[2, 4\] torch.bfloat16, not \[2, 4\] torch"),
    (lambda: elsewhere("log_sums", 2, 4), "log_sums is on meta"),
    (lambda: {"position": 2}, "position 2 is outside the 2 sites of phase 1"),
    (lambda: {"position": -1}, "position -1 is outside"),
    (lambda: {"row": 5}, "row 5 is outside the 5 slots"),  # and the rest of a site
    (lambda: {"first": 4}, "first 4 is outside 0..3, the row of the partial sum"),
    (lambda: {"first": -1}, "first -1 is outside 0..3"),
]


@pytest.mark.parametrize(
    ("function", "changes", "sentence"),
    [
        pytest.param(function, *row, id=f"{function.__name__}-{row[1]}")
        for function, rows in (
            *((single_pass, OF_A_SITE), (phase_1, OF_A_GROUP), (phase_2, OF_A_MERGE)),
        )
        for row in rows
    ],
)
def test_each_broken_contract_is_named(
    function: Callable,
    changes: Callable[[], dict[str, Any]],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is launched."""
    monkeypatch.setattr(triton_single_pass, "site_kernel", None)
    monkeypatch.setattr(triton_phase_1, "phase_1_kernel", None)
    kind = TypeError if sentence.startswith("^") else ValueError
    with pytest.raises(kind, match=sentence):
        function(**valid(function, **changes()))


@pytest.mark.skipif(ON_GPU, reason="needs tensors without a Triton backend")
def test_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names both ways out."""
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match="torch path, or set TRITON_INTERPRET=1 before"):
        single_pass(**valid(single_pass))


@pytest.mark.parametrize("function", [single_pass, phase_2])
def test_one_launch_and_none_for_no_tokens(
    function: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch has a program for each token."""
    monkeypatch.setattr(triton_single_pass, "site_kernel", spy := Spy())
    function(**valid(function))
    assert function(**valid(function, tokens=0)).shape == (0, 96)
    assert spy.grids == [(4,)]
