"""The triton backend's operators: torch's rules, and what a compiler makes of a bank in place."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_place import check_compiled, inputs
from kernel_cases import DTYPES, Case
from triton_cases import poison  # noqa: F401
from triton_interpreter import (
    DEVICE,
    ON_GPU,
    RUNNABLE,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
)

from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import slot_of
from attnres_serve.kernels.triton import backend as triton_backend
from tests.kernels import test_backends as every_backend

pytestmark = pytest.mark.usefixtures("interpreter")
TOKENS = 5


@pytest.mark.usefixtures("poison")
@pytest.mark.skipif(ON_GPU, reason="the other backends' cases are on the CPU")
@settings(max_examples=20, deadline=None)
@given(drawn=every_backend.cases(), sites=st.integers(1, 6))
def test_any_shape_and_magnitude(drawn: tuple[Case, torch.dtype], sites: int) -> None:
    """What the tests of the other backends ask of them, in every dtype; of three tokens at most."""
    case, dtype = drawn
    case = replace(case, tokens=case.tokens % 4)
    backend = every_backend.Functions(backends.load("triton"))
    every_backend.test_single_pass(case, dtype, backend, lambda *tensors: None)
    every_backend.test_two_phase(case, dtype, sites, backend, lambda *tensors: None)


@pytest.mark.parametrize(("dtype", "hidden"), [*zip(DTYPES, (48, 47, 65), strict=True)], ids=str)
def test_operators_keep_the_rules_of_torch(dtype: torch.dtype, hidden: int) -> None:
    """Schemas (what is written to, too), fakes and dispatch, as torch's own check sees them."""
    backends.load("triton")
    delta, bank, sites = inputs(TOKENS, DEVICE, hidden, dtype)
    queries = triton_backend.queries_of(sites)
    operators = torch.ops.attnres_serve
    first, second, third = (
        triton_backend._site(sites[0], slot_of(2, False, position, first=1, number=1))
        for position in range(3)
    )
    _, *answers = operators.triton_phase_1(delta, bank, queries, 3, True, *first)
    keys = [one.query for one in sites], [one.key_norm for one in sites]
    cases = {
        "fold": (*keys, 0.5),
        "single_pass": (delta, bank, queries, *second),
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


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_triton_backend_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
