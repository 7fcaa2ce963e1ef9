"""The triton backend's operators: torch's rules, and what a compiler makes of a bank in place."""

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from triton_interpreter import (
    DEVICE,
    RUNNABLE,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
)

from attnres_serve.kernels import backends, triton_backend
from attnres_serve.kernels.backends import SiteWeights

pytestmark = pytest.mark.usefixtures("interpreter")
TOKENS, SLOTS, HIDDEN = 5, 4, 48


def inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, SiteWeights]:
    """A delta, a bank with three rows in use, folded queries, and a site."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    weights = draw(HIDDEN), draw(HIDDEN), 1.0, 1e-6, draw(1), draw(HIDDEN), 1e-5
    return draw(tokens, HIDDEN), draw(tokens, SLOTS, HIDDEN), draw(3, HIDDEN), SiteWeights(*weights)


def test_operators_keep_the_rules_of_torch() -> None:
    """Schemas (what is written to, too), fakes and dispatch, as torch's own check sees them."""
    backends.load("triton")
    delta, bank, queries, site = inputs()
    own = queries[0], site.norm_weight, site.bias, 2, False, 1e-6, 1e-5
    operators = torch.ops.attnres_serve
    answers = operators.triton_inter_block(bank, queries, 2, 1e-6)
    for operator, arguments in [
        (operators.triton_single_pass, (delta, bank, *own)),
        (operators.triton_inter_block, (bank, queries, 2, 1e-6)),
        (operators.triton_complete_row, (delta, bank, 2, False)),
        (operators.triton_norm_answer, (answers[0], site.norm_weight, 1, 1e-5)),
        (operators.triton_merge, (delta, bank, *answers, 1, *own)),
    ]:
        torch.library.opcheck(operator.default, arguments)


def sites(bank: Tensor, delta: Tensor, queries: Tensor, site: SiteWeights) -> Tensor:
    """Sites of both algorithms, on a bank that came from outside the graph with two rows in use."""
    x = triton_backend.single_pass(torch.tanh(delta), bank, queries[0], site, 1, False)
    answers = triton_backend.inter_block(bank, queries, 2, 1e-6)
    x = triton_backend.norm_answer(answers, 0, site)
    x = triton_backend.merge(torch.tanh(x), bank, answers, 1, queries[1], site, 2, True)
    triton_backend.complete_row(torch.tanh(x), bank, 2, False)  # as where a cumulative block opens
    x = bank[:, 2].clone()
    return triton_backend.single_pass(x, bank, queries[2], site, 3, True)


@pytest.mark.parametrize("second_version", [True, False])  # False is vLLM's choice
def test_a_compiled_graph_writes_the_bank_in_place(second_version: bool) -> None:
    """The same numbers for any number of tokens, and no second bank in the generated code."""
    backends.load("triton")
    torch.compiler.reset()
    options = {"enable_auto_functionalized_v2": second_version}
    compiled = torch.compile(sites, fullgraph=True, dynamic=True, options=options)
    for tokens in (5, 9):
        delta, bank, queries, site = inputs(tokens)
        other = bank.clone()
        wanted = sites(other, delta, queries, site)
        found, code = run_and_get_code(compiled, bank, delta, queries, site)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(bank, other, atol=1e-6, rtol=1e-6)
    made = re.findall(r"= empty_strided\w*\(\(([^)]*)\)", "".join(code))
    assert made and all(len(shape.rstrip(", ").split(",")) < 3 for shape in made), made


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_triton_backend_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
