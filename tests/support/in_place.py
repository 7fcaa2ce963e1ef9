"""Backends that work in place, on one bank: a run through all of their functions."""

import re
from types import ModuleType
from typing import NamedTuple

import torch
from compiling import reset_compiler
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from attnres_serve.kernels.interface import SiteWeights, slot_of

SLOTS, HIDDEN, SITES = 4, 48, 3


class Inputs(NamedTuple):
    """A sublayer's output, a bank with two rows in use, and the sites of a stage."""

    delta: Tensor
    bank: Tensor
    sites: list[SiteWeights]


def inputs(
    tokens: int, device: str, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32
) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    sites = [
        SiteWeights(
            *(draw(hidden), draw(hidden), draw(SLOTS), draw(hidden).to(dtype)), 0.5, 1e-6, 1e-5
        )
        for _ in range(SITES)
    ]
    return Inputs(draw(tokens, hidden).to(dtype), draw(tokens, SLOTS, hidden).to(dtype), sites)


def run(backend: ModuleType, delta: Tensor, bank: Tensor, sites: list[SiteWeights]) -> Tensor:
    """Sites of every algorithm, one after the other."""
    queries = backend.queries_of(sites)
    growing, begun = slot_of(1, False), slot_of(2, True, position=1, first=2)
    x = backend.single_pass(torch.tanh(delta), bank, queries, sites[0], growing)
    group = queries, 2, sites[0], growing, True
    x, answers = backend.phase_1(torch.tanh(x), bank, *group)
    x = backend.phase_2(torch.tanh(x), bank, answers, queries, sites[1], begun)
    backend.add_to_row(torch.tanh(x), bank, 2)  # as where a cumulative block opens
    x = bank[:, 2].clone()
    return backend.single_pass(x, bank, queries, sites[2], slot_of(3, True, position=2))


def check_compiled(backend: ModuleType, device: str, second_version: bool) -> None:
    """The same numbers for any number of tokens, and no second bank in the generated code."""
    reset_compiler()
    options = {"enable_auto_functionalized_v2": second_version}

    def graph(delta: Tensor, bank: Tensor, sites: list[SiteWeights]) -> Tensor:
        return run(backend, delta, bank, sites)

    # As vLLM compiles: nothing but the number of tokens is dynamic.
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
    for tokens in (5, 9):
        delta, bank, sites = inputs(tokens, device)
        for tensor in (delta, bank):
            torch._dynamo.mark_dynamic(tensor, 0)
        other, before = bank.clone(), delta.clone()
        wanted = run(backend, delta, other, sites)
        assert torch.equal(delta, before)  # sites write over what tanh made, not over this
        found, code = run_and_get_code(compiled, delta, bank, sites)
        # A compiler adds up in another order: tens of roundings of 2^-24, of the bank's sums a few.
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(bank, other, atol=1e-6, rtol=1e-6)
        assert torch.equal(delta, before)
    delta, bank, sites = inputs(7, device)  # the same graph for another number of tokens
    other = bank.clone()
    wanted = run(backend, delta, other, sites)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(delta, bank, sites), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bank, other, atol=1e-6, rtol=1e-6)
    made = re.findall(r"= empty_strided\w*\(\(([^)]*)\)", "".join(code))
    assert made and not [shape for shape in made if f"{SLOTS}, {HIDDEN}" in shape], made
