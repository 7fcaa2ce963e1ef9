"""Compiled graphs call sites of the cpp backend past torch's dispatcher."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import in_place
import pytest
import torch
from compiling import lowered_anew, reset_compiler
from kernel_cases import DTYPES
from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN
from torch._inductor.utils import run_and_get_code

from attnres_serve.kernels import backends
from attnres_serve.kernels.cpp import backend as cpp_backend
from attnres_serve.kernels.cpp import direct as cpp_direct
from attnres_serve.kernels.interface import SiteWeights, slot_of

PLACE = slot_of(2, fresh=False)
WEIGHTS = in_place.inputs(1, "cpu").sites[0]
DIRECT = [f"attnres_{name}(" for name in cpp_direct.NAMES]
OPERATORS = [f"{cpp_direct.operator(name)}(" for name in cpp_direct.NAMES]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    backends.load("cpp")


def site(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """Sites behind something that is computed: what is compiled."""
    torch._check(x.shape[0] == bank.shape[0])
    return three_sites(x, bank, weights)


def three_sites(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """One by itself, and a group of two."""
    queries = [weights] * 3
    x = cpp_backend.single_pass(torch.tanh(x), bank, queries, weights, PLACE)
    group = queries, 2, weights, PLACE, True
    x, answers = cpp_backend.phase_1(torch.tanh(x), bank, *group)
    slot = slot_of(3, fresh=True, position=1, first=3)
    return cpp_backend.phase_2(torch.tanh(x), bank, answers, queries, weights, slot)


def compile_and_run(graph: Callable, x: Tensor, bank: Tensor, weights: SiteWeights):
    """The compiled graph, what it made of the arguments, and how its code calls the sites."""
    reset_compiler()
    for tensor in (x, bank):
        torch._dynamo.mark_dynamic(tensor, 0)
    with lowered_anew():
        compiled = torch.compile(graph, fullgraph=True, dynamic=False)
        normed, (code,) = run_and_get_code(compiled, x, bank, weights)
    calls = re.findall("|".join(map(re.escape, (*DIRECT, *OPERATORS))), code)
    return compiled, normed, calls


def arguments(tokens: int, hidden: int, dtype: torch.dtype, **changes) -> dict[str, tuple]:
    """Those of each operator on a state of its own: what it writes to stands first."""
    x, bank, (weights, *_) = in_place.inputs(tokens, "cpu", hidden, dtype)
    weights = weights._replace(**changes)
    own = cpp_backend.arguments(weights, PLACE)
    answers = torch.randn(2, tokens, hidden).to(dtype), torch.randn(2, tokens)
    keys = [weights.query] * 3, [weights.key_norm] * 3
    learned = None if weights.bias is None else [weights.bias] * 3, weights.norm_weight
    return {
        "single_pass": (x, bank, *own),
        "phase_1": (x, bank, *answers, *own[:2], True, *keys, *learned),
        "phase_2": (x, bank, *answers, 1, 1, *own),
    }


def copied(given: tuple) -> tuple:
    return tuple(one.clone() if isinstance(one, Tensor) else one for one in given)


@pytest.mark.parametrize("name", cpp_direct.NAMES)
@pytest.mark.parametrize("norm_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_as_the_operator(
    dtype: torch.dtype, norm_dtype: torch.dtype, name: str
) -> None:
    """With and without a bias, for any number of tokens and sizes that no vector divides."""
    for tokens, hidden in ((0, 66), (1, 66), (5, 7), (1003, 66)):
        layout = cpp_direct.layout(hidden, in_place.SLOTS, dtype, norm_dtype)
        norm_weight = torch.randn(hidden).to(norm_dtype)
        for bias in (torch.randn(in_place.SLOTS), None):
            given = arguments(tokens, hidden, dtype, norm_weight=norm_weight, bias=bias)[name]
            found, wanted = copied(given), copied(given)
            cpp_direct.calls[name](*found, tokens, layout)
            getattr(torch.ops.attnres_serve, f"cpp_{name}")(*wanted)
            for one, other in zip(found, wanted, strict=True):
                assert not isinstance(one, Tensor) or torch.equal(one, other)
            assert tokens == 0 or not torch.equal(found[1], given[1])


def test_a_compiled_graph_calls_it() -> None:
    """For any number of tokens, by one graph."""
    dtype = torch.bfloat16
    x, bank, (weights, *_) = in_place.inputs(5, "cpu", 66, dtype)
    compiled, _, calls = compile_and_run(site, x, bank, weights)
    assert calls == DIRECT
    for tokens in (2, 5, 1003):
        x, bank, (weights, *_) = in_place.inputs(tokens, "cpu", 66, dtype)
        other = bank.clone()
        with torch._dynamo.config.patch(error_on_recompile=True):
            normed = compiled(x, bank, weights)
        torch.testing.assert_close(normed, site(x, other, weights))
        torch.testing.assert_close(bank, other)  # tanh by inductor rounds in its own way


def strided(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """Slots of a larger bank, which the direct call would take for the whole of one."""
    return site(x, bank[:, : in_place.SLOTS], weights)


def of_another_batch(x: Tensor, bank: Tensor, weights: SiteWeights) -> Tensor:
    """A bank that nothing known says to have as many tokens."""
    return three_sites(x, bank, weights)


@pytest.mark.parametrize("graph", [strided, of_another_batch])
def test_what_the_call_cannot_read_goes_to_the_operator(graph: Callable) -> None:
    x, bank, (weights, *_) = in_place.inputs(5, "cpu")
    bank = torch.cat([bank, bank], dim=1)
    other = bank.clone()
    _, normed, calls = compile_and_run(graph, x, bank, weights)
    assert calls == OPERATORS
    torch.testing.assert_close(normed, graph(x, other, weights))
    torch.testing.assert_close(bank, other)


@pytest.mark.parametrize(
    ("missing", "named", "problem"),
    [
        ("ENTRY", "of_another_library", "compiled without Python's headers."),
        ("TORCH", "2.12.", "direct calls are for torch 2.12, and this is "),
    ],
)
def test_without_direct_calls(
    missing: str, named: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compiled without Python's headers, or with another torch, no code is generated for them.

    Code that was generated elsewhere for direct calls calls the operators.
    """
    for name in cpp_direct.NAMES:
        monkeypatch.delitem(CUSTOM_EXTERN_KERNEL_CODEGEN, cpp_direct.operator(name))
        monkeypatch.setitem(cpp_direct.calls, name, partial(cpp_direct._by_operator, name))
    monkeypatch.setattr(cpp_direct, missing, named)
    monkeypatch.setattr(cpp_direct, "problem", None)
    library = next(Path(path) for path in torch.ops.loaded_libraries if "cpp_operators" in path)
    cpp_direct.install(library)
    assert problem in str(cpp_direct.problem)
    assert not CUSTOM_EXTERN_KERNEL_CODEGEN.keys() & {*map(cpp_direct.operator, cpp_direct.NAMES)}
    layout = cpp_direct.layout(in_place.HIDDEN, in_place.SLOTS, torch.float32, torch.float32)
    for name, given in arguments(5, in_place.HIDDEN, torch.float32).items():
        found, wanted = copied(given), copied(given)
        getattr(torch.ops.attnres_serve, f"cpp_{name}")(*wanted)
        cpp_direct.calls[name](*found, 5, layout)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_wrong_arguments() -> None:
    """One sentence, as the operator's; nothing is read or written."""
    layout = cpp_direct.layout(in_place.HIDDEN, in_place.SLOTS, torch.float32, torch.float32)
    for name, (x, bank, *rest) in arguments(5, in_place.HIDDEN, torch.float32).items():
        call, before = cpp_direct.calls[name], bank.clone()
        with pytest.raises(TypeError, match=f"expected {len(rest) + 4} arguments, not 2"):
            call(x, bank)
        with pytest.raises(TypeError, match="int"):
            call(x, bank, *rest, "5", layout)
        with pytest.raises(RuntimeError, match="must not share memory with the bank"):
            call(bank[0], bank, *rest, 5, layout)
        with pytest.raises(RuntimeError):
            call(x, bank, *rest[:-1], None, 5, layout)
        packed, _ = cpp_backend.numbers(WEIGHTS, PLACE)
        at = next(i for i, one in enumerate(rest) if type(one) is int and one == packed)
        rest[at], _ = cpp_backend.numbers(WEIGHTS, slot_of(in_place.SLOTS, fresh=True))
        with pytest.raises(RuntimeError, match="the row is outside of the bank"):
            call(x, bank, *rest, 5, layout)
        assert torch.equal(bank, before)


def test_a_profiler_sees_the_calls() -> None:
    """By the operator's name, where inductor's own loops are seen too: `bench` asks for that."""
    x, bank, (weights, *_) = in_place.inputs(5, "cpu")
    with config.patch({"cpp.enable_kernel_profile": True}):
        compiled, _, calls = compile_and_run(site, x, bank, weights)
        assert calls == DIRECT
        with torch.profiler.profile() as profiler:
            compiled(x, bank, weights)
            compiled(x, bank, weights)
    seen = [event.name for event in profiler.events()]
    assert [seen.count(f"attnres_serve::cpp_{name}") for name in cpp_direct.NAMES] == [2, 2, 2]
