"""The triton backend's operators: torch's rules, and what a compiler makes of a bank in place."""

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
        (operators.triton_merge, (delta, bank, *answers, 1, *own)),
    ]:
        torch.library.opcheck(operator.default, arguments)


def sites(embedding: Tensor, queries: Tensor, site: SiteWeights) -> tuple[Tensor, Tensor]:
    """A bank made inside the graph, as the model makes it, and three sites of two algorithms."""
    bank = embedding.new_empty((embedding.shape[0], SLOTS, HIDDEN))
    bank[:, :1] = embedding.unsqueeze(1)
    x = triton_backend.single_pass(torch.tanh(embedding), bank, queries[0], site, 1, True)
    answers = triton_backend.inter_block(bank, queries, 2, 1e-6)
    x = triton_backend.merge(torch.tanh(x), bank, answers, 0, queries[0], site, 2, True)
    x = triton_backend.merge(torch.tanh(x), bank, answers, 1, queries[1], site, 2, False)
    return x, bank[:, :3]


def test_a_compiled_graph_writes_the_bank_in_place() -> None:
    """The same numbers for any number of tokens, and in the generated code one bank, no copy."""
    backends.load("triton")
    torch.compiler.reset()
    compiled = torch.compile(sites, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        embedding, _, queries, site = inputs(tokens)
        wanted = sites(embedding, queries, site)
        found, code = run_and_get_code(compiled, embedding, queries, site)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    banks = {
        line.split("=")[0].strip()
        for line in "".join(code).splitlines()
        if "= empty_strided" in line and f", {SLOTS}, {HIDDEN})" in line
    }
    assert len(banks) == 1, "".join(code)


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_triton_backend_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
