"""The triton backend: what every backend is asked, and what torch asks of its operators."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_place import check_compiled, inputs
from kernel_cases import DTYPES, ROWS, WIDE_ROWS, Case, identify
from torch import Tensor
from triton_cases import poison  # noqa: F401
from triton_interpreter import DEVICE

from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import slot_of
from attnres_serve.kernels.triton import backend as triton_backend
from attnres_serve.kernels.triton import phase_1 as triton_phase_1
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import Least
from tests.kernels import test_backends as every_backend

pytestmark = pytest.mark.usefixtures("interpreter")
TOKENS = 5


def functions(layout: every_backend.Layout = every_backend.DENSE) -> every_backend.Functions:
    return every_backend.Functions(backends.load("triton"), layout)


def unwatched(*tensors: Tensor) -> None:
    """In the place of ``unwritten``; the functions themselves see to it."""


# Dtypes and layouts in turn; every other row has a token or two.
OWN = [
    # An element more than a power of two, rows of several at a time and of one, the largest block.
    *(Case(hidden=hidden, count=2) for hidden in (513, 4097, 8193)),
    # A tile that is full, and one source more or less.
    *(Case(count=count, hidden=96) for count in (4, 5, 6)),
    # A tile more of biases, and a size beyond that of one reduction.
    Case(count=5, hidden=4097, bias="some"),
    Case(count=2, hidden=4097, bias="blocks"),
    # Norm weights that some families keep in float32.
    *(Case(norm_dtype=dtype) for dtype in DTYPES),
]
LAYOUTS = [every_backend.DENSE, *every_backend.LAYOUTS.values()]
TURNS = [*zip(ROWS + OWN, cycle(DTYPES), cycle(LAYOUTS), strict=False)]
TURNS += [(row, torch.bfloat16, every_backend.DENSE) for row in WIDE_ROWS]


def few(case: Case) -> Case:
    return replace(case, tokens=min(case.tokens, 2), device=DEVICE)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("case", "dtype", "layout"), TURNS, ids=identify)
def test_rows(case: Case, dtype: torch.dtype, layout: every_backend.Layout) -> None:
    """What every backend is asked."""
    own = few(case), dtype
    every_backend.test_single_pass(*own, functions(layout), unwatched)
    every_backend.test_two_phase(*own, 1, functions(layout), unwatched)


@pytest.mark.usefixtures("poison")
@settings(max_examples=6, deadline=None)
@given(
    drawn=every_backend.cases(),
    sites=st.integers(1, 3),
    layout=every_backend.layouts,
    many=st.booleans(),
)
def test_any_shape_magnitude_and_layout(
    drawn: tuple[Case, torch.dtype], sites: int, layout: every_backend.Layout, many: bool
) -> None:
    """With few sources, each of which is the last of a group once; ``test_rows`` has many.

    ``many``: a group is scored by a product, as that of many tokens is.
    """
    case, dtype = drawn
    case = replace(few(case), count=min(case.count, 5))
    with pytest.MonkeyPatch.context() as patch:  # hypothesis has no fixture for each example
        if many:
            patch.setattr(triton_phase_1, "LEAST", {MAX_HIDDEN: Least(logits=1, sites=2)})
        every_backend.check_all(case, dtype, sites, functions(layout))


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [
        (torch.bfloat16, 47),
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)
            for one in zip(DTYPES, (48, 65, 64), strict=True)
        ),
    ],
    ids=str,
)
def test_operators_keep_the_rules_of_torch(dtype: torch.dtype, hidden: int) -> None:
    """Schemas (what is written to, too), fakes and dispatch, as torch's own check sees them."""
    backends.load("triton")
    delta, bank, sites = inputs(TOKENS, DEVICE, hidden, dtype)
    queries, biases = triton_backend.queries_of(sites)
    operators = torch.ops.attnres_serve
    first, second, third = (
        triton_backend._site(
            sites[0]._replace(bias=sites[0].bias if position == 2 else biases),
            slot_of(2, False, position, first=1, number=1),
        )
        for position in range(3)
    )
    _, *answers = operators.triton_phase_1(delta, bank, queries, 3, True, *first)
    keys = [one.query for one in sites], [one.key_norm for one in sites]
    cases = {
        "fold": (*keys, 0.5),
        "pad": ([torch.ones(at + 1) for at in range(3)],),
        "single_pass": (delta, bank, queries, *third),
        "phase_1": (delta, bank, queries, 2, False, *second),
        "phase_2": (delta, bank, *answers, queries, *third),
        "add_to_row": (delta, bank, 2),
    }
    assert [f"triton_{name}" for name in cases] == list(triton_backend.SCHEMAS)
    for name, arguments in cases.items():
        operator = getattr(operators, f"triton_{name}").default
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize(
    "second_version", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)  # False is vLLM's choice
def test_a_compiled_graph_writes_the_bank_in_place(second_version: bool) -> None:
    check_compiled(backends.load("triton"), DEVICE, second_version)
