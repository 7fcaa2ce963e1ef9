"""Byte counts: what the kernels read and write in the interpreter, the functions that predict it,
and the formulae of docs/performance.md."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from triton_interpreter import (
    INTERPRETED,
    ON_GPU,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
)

from attnres_serve.kernels import traffic
from attnres_serve.kernels.triton_single_pass import single_pass
from attnres_serve.kernels.triton_two_phase import inter_block, merge, norm_answer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS, HIDDEN, SLOTS = 3, 257, 8
EPS = {"key_eps": 1e-6, "norm_eps": 1e-5}

watched = pytest.mark.skipif(ON_GPU, reason="only the interpreter shows every address")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> Callable[..., int]:  # noqa: F811
    """Call a function and count its launch's bytes: what is read once, and what is written once."""
    from triton.runtime.interpreter import InterpreterBuilder

    touched: dict[str, list[np.ndarray]] = {"load": [], "store": []}

    def watch(kind: str, mask_at: int) -> None:
        method = getattr(InterpreterBuilder, f"create_masked_{kind}")

        def watching(self, pointers, *arguments):
            size = pointers.get_element_ty().primitive_bitwidth // 8
            first = pointers.data[arguments[mask_at].data.astype(bool)].reshape(-1, 1)
            touched[kind].append((first + np.arange(size, dtype=first.dtype)).ravel())
            return method(self, pointers, *arguments)

        monkeypatch.setattr(InterpreterBuilder, f"create_masked_{kind}", watching)

    watch("load", 0)
    watch("store", 1)

    def run(function: Callable, *arguments, **options) -> int:
        for kind in touched.values():
            kind.clear()
        function(*arguments, **options)
        return sum(np.unique(np.concatenate(kind)).size for kind in touched.values())

    return run


def _tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Delta, bank, query and norm weight."""
    vector = torch.randn(TOKENS, HIDDEN).to(dtype)
    bank = torch.randn(TOKENS, SLOTS, HIDDEN).to(dtype)
    return vector, bank, torch.randn(HIDDEN), torch.ones(HIDDEN, dtype=dtype)


@watched
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("row", [0, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_pass_moves_what_is_stated(moved, dtype, row, fresh) -> None:
    """Rows 0 to ``row``, each once; nothing of a row behind them."""
    found = moved(single_pass, *_tensors(dtype), row=row, fresh=fresh, **EPS)
    assert found == traffic.single_pass(TOKENS, row, HIDDEN, dtype, fresh=fresh)


@watched
@pytest.mark.parametrize(("count", "sites"), [(1, 1), (3, 4), (5, 9)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_phase_moves_what_is_stated(moved, dtype, count, sites) -> None:
    """Rows once for all sites, however many groups; one answer and one number for each site."""
    delta, bank, query, weight = _tensors(dtype)
    queries = torch.randn(sites, HIDDEN)
    found = moved(inter_block, bank, queries, count=count, key_eps=1e-6)
    assert found == traffic.inter_block(TOKENS, count, sites, HIDDEN, dtype)
    answers = inter_block(bank, queries, count=count, key_eps=1e-6)
    for fresh in (False, True):
        where = {"row": count, "position": sites - 1, "fresh": fresh}
        found = moved(merge, delta, bank, *answers, query, weight, **where, **EPS)
        assert found == traffic.merge(TOKENS, HIDDEN, dtype, fresh=fresh)
    found = moved(norm_answer, answers[0], weight, position=0, norm_eps=1e-5)
    assert found == traffic.norm_answer(TOKENS, HIDDEN, dtype)


def _vectors(count: Callable[..., int], *shape: int) -> float:
    """Bytes of a block in vectors, at so many tokens that queries, weights and sums vanish."""
    return count(10**6, *shape, 4096, torch.bfloat16) / (10**6 * 4096 * 2)


@pytest.mark.parametrize("sites", [2, 3, 8, 24])
@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_a_block_of_sites_in_vectors(blocks: int, sites: int) -> None:
    """The formulae of docs/performance.md."""
    single = _vectors(traffic.single_pass_block, blocks, sites)
    assert single == pytest.approx(sites * (blocks + 4) - 2, rel=1e-4)
    two_phase = _vectors(traffic.two_phase_block, blocks, sites)
    # A float32 sum for a vector of 4096 halves, written and read: 1/1024 of a vector per site.
    assert two_phase == pytest.approx(blocks + 6 * sites - 1 + sites / 1024, rel=1e-4)


def test_where_two_phase_moves_fewer_bytes() -> None:
    """From so many sites of a block on; below three finished blocks never."""
    first = {}
    for blocks in range(1, 17):
        for sites in range(2, 200):
            shape = 8192, blocks, sites, 4096, torch.bfloat16
            if traffic.two_phase_block(*shape) < traffic.single_pass_block(*shape):
                first[blocks] = sites
                break
    assert first == {3: 5, 4: 3, 5: 3} | dict.fromkeys(range(6, 17), 2)


@pytest.mark.parametrize(
    ("blocks", "sites", "ratio"),
    [(2, 24, 1.02), (4, 2, 1.07), (4, 8, 0.82), (9, 8, 0.55), (9, 24, 0.49)],
)
def test_ratios_of_the_documentation(blocks: int, sites: int, ratio: float) -> None:
    """Two-phase over single pass, at 8192 tokens of 4096 halves."""
    shape = 8192, blocks, sites, 4096, torch.bfloat16
    found = traffic.two_phase_block(*shape) / traffic.single_pass_block(*shape)
    assert round(found, 2) == ratio


if not ON_GPU and not INTERPRETED:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_traffic_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
