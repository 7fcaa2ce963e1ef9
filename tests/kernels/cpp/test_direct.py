"""Compiled graphs call the single pass of the cpp backend past torch's dispatcher."""

import re
from collections.abc import Callable
from pathlib import Path

import in_place
import pytest
import torch
from kernel_cases import DTYPES
from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN
from torch._inductor.utils import run_and_get_code

from attnres_serve.kernels import backends
from attnres_serve.kernels.cpp import backend as cpp_backend
from attnres_serve.kernels.cpp import direct as cpp_direct
from attnres_serve.kernels.interface import SiteWeights, place_of

PLACE = place_of(2, fresh=False)
DIRECT, OPERATOR = "attnres_single_pass(", f"{cpp_direct.OPERATOR}("


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    backends.load("cpp")
    torch.compiler.reset()


def site(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """One site behind something that is computed: what is compiled."""
    torch._check(x.shape[0] == bank.shape[0])
    return cpp_backend.single_pass(torch.tanh(x), bank, [weights], weights, PLACE)


def compile_and_run(graph: Callable, x: Tensor, bank: Tensor, weights: SiteWeights):
    """The compiled graph, what it made of the arguments, and how its code calls the site."""
    for tensor in (x, bank):
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.compiler.config.patch(force_disable_caches=True):
        compiled = torch.compile(graph, fullgraph=True, dynamic=False)
        normed, (code,) = run_and_get_code(compiled, x, bank, weights)
    calls = re.findall(f"{re.escape(DIRECT)}|{re.escape(OPERATOR)}", code)
    return compiled, normed, calls


def learned(weights: SiteWeights) -> tuple:
    return weights.query, weights.key_norm, weights.bias, weights.norm_weight


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("norm_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_as_the_operator(
    dtype: torch.dtype, norm_dtype: torch.dtype, fresh: bool
) -> None:
    """With and without a bias, for any number of tokens and sizes that no vector divides."""
    for tokens, hidden in ((0, 66), (1, 66), (5, 7), (1003, 66)):
        x, bank, (weights, *_) = in_place.inputs(tokens, "cpu", hidden, dtype)
        weights = weights._replace(norm_weight=weights.norm_weight.to(norm_dtype))
        for given in (weights, weights._replace(bias=None)):
            own = cpp_backend.numbers(given, place_of(2, fresh))
            layout = cpp_direct.layout(hidden, in_place.SLOTS, dtype, norm_dtype)
            normed, grown, wanted, bank_wanted = x.clone(), bank.clone(), x.clone(), bank.clone()
            cpp_direct.single_pass(normed, grown, *learned(given), tokens, layout, *own)
            torch.ops.attnres_serve.cpp_single_pass(wanted, bank_wanted, *own, *learned(given))
            assert torch.equal(normed, wanted) and torch.equal(grown, bank_wanted)
            assert tokens == 0 or not torch.equal(grown, bank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_graph_calls_it(dtype: torch.dtype) -> None:
    """For any number of tokens, by one graph."""
    x, bank, (weights, *_) = in_place.inputs(5, "cpu", 66, dtype)
    compiled, _, calls = compile_and_run(site, x, bank, weights)
    assert calls == [DIRECT]
    for tokens in (2, 5, 1003):
        x, bank, (weights, *_) = in_place.inputs(tokens, "cpu", 66, dtype)
        other = bank.clone()
        with torch._dynamo.config.patch(error_on_recompile=True):
            normed = compiled(x, bank, weights)
        torch.testing.assert_close(normed, site(x, other, weights))
        torch.testing.assert_close(bank, other)  # tanh by inductor rounds in its own way


def strided(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """Slots of a larger bank, which the direct call would take for the whole of one."""
    return site(x, bank[:, 1:], weights)


def of_another_batch(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """A bank that nothing known says to have as many tokens."""
    return cpp_backend.single_pass(torch.tanh(x), bank, [weights], weights, PLACE)


@pytest.mark.parametrize("graph", [strided, of_another_batch])
def test_what_the_call_cannot_read_goes_to_the_operator(graph: Callable) -> None:
    x, bank, (weights, *_) = in_place.inputs(5, "cpu")
    other = bank.clone()
    _, normed, calls = compile_and_run(graph, x, bank, weights)
    assert calls == [OPERATOR]
    torch.testing.assert_close(normed, graph(x, other, weights))
    torch.testing.assert_close(bank, other)


@pytest.mark.parametrize(("missing", "name"), [("ENTRY", "of_another_library"), ("TORCH", "2.12.")])
def test_without_direct_calls(missing: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled without Python's headers, or with another torch, operators are called as before.

    So they are by code that was generated elsewhere, for direct calls.
    """
    x, bank, (weights, *_) = in_place.inputs(5, "cpu")
    monkeypatch.delitem(CUSTOM_EXTERN_KERNEL_CODEGEN, cpp_direct.OPERATOR)
    monkeypatch.setattr(cpp_direct, missing, name)
    monkeypatch.setattr(cpp_direct, "single_pass", cpp_direct._by_operator)
    library = next(Path(path) for path in torch.ops.loaded_libraries if "cpp_backend" in path)
    cpp_direct.install(library)
    _, _, calls = compile_and_run(site, x, bank.clone(), weights)
    assert calls == [OPERATOR]

    own, other = cpp_backend.numbers(weights, PLACE), bank.clone()
    layout = cpp_direct.layout(in_place.HIDDEN, in_place.SLOTS, torch.float32, torch.float32)
    wanted = cpp_backend.single_pass(x.clone(), other, [weights], weights, PLACE)
    cpp_direct.single_pass(x, bank, *learned(weights), 5, layout, *own)
    assert torch.equal(x, wanted) and torch.equal(bank, other)


def test_wrong_arguments() -> None:
    """One sentence, as the operator's; nothing is read or written."""
    x, bank, (weights, *_) = in_place.inputs(5, "cpu")
    own, given = cpp_backend.numbers(weights, PLACE), learned(weights)
    layout = cpp_direct.layout(in_place.HIDDEN, in_place.SLOTS, torch.float32, torch.float32)
    before = bank.clone()
    with pytest.raises(TypeError, match="six tensors and four numbers"):
        cpp_direct.single_pass(x, bank)
    with pytest.raises(TypeError, match="int"):
        cpp_direct.single_pass(x, bank, *given, "5", layout, *own)
    with pytest.raises(RuntimeError, match="must not share memory with the bank"):
        cpp_direct.single_pass(bank[0], bank, *given, 5, layout, *own)
    outside = cpp_backend.numbers(weights, place_of(in_place.SLOTS, fresh=True))
    with pytest.raises(RuntimeError, match="the row is outside of the bank"):
        cpp_direct.single_pass(x, bank, *given, 5, layout, *outside)
    with pytest.raises(RuntimeError):
        cpp_direct.single_pass(x, bank, None, *given[1:], 5, layout, *own)
    assert torch.equal(bank, before)


def test_a_profiler_sees_the_calls() -> None:
    """By the operator's name, where inductor's own loops are seen too: `bench` asks for that."""
    x, bank, (weights, *_) = in_place.inputs(5, "cpu")
    with config.patch({"cpp.enable_kernel_profile": True}):
        compiled, _, calls = compile_and_run(site, x, bank, weights)
        assert calls == [DIRECT]
        with torch.profiler.profile() as profiler:
            compiled(x, bank, weights)
            compiled(x, bank, weights)
    assert [event.name for event in profiler.events()].count(cpp_direct.NAME) == 2
