"""Byte counts: what the kernels read and write in the interpreter, the functions that predict it,
and the formulae of docs/measure/bytes.md."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from triton_interpreter import ON_GPU

from attnres_serve.kernels.triton import mix_group, score_group
from attnres_serve.kernels.triton import phase_1 as triton_phase_1
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import Least, phase_1
from attnres_serve.kernels.triton.phase_2 import phase_2
from attnres_serve.kernels.triton.single_pass import single_pass
from benchmarks.kernels import traffic

DTYPES = (torch.float32, torch.bfloat16)  # of both sizes of an element
TOKENS, HIDDEN, SLOTS = 3, 257, 8
EPS = {"key_eps": 1e-6, "norm_eps": 1e-5}

watched = pytest.mark.skipif(ON_GPU, reason="only the interpreter shows every address")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> Callable[..., int]:
    """Call a function and count its launch's bytes: what is read once, and what is written once.

    With ``reads_back``, what a program reads of what it wrote itself is not counted.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    touched: dict[str, list[np.ndarray]] = {"load": [], "store": []}
    reading_back = False

    def watch(kind: str, mask_at: int) -> None:
        method = getattr(InterpreterBuilder, f"create_masked_{kind}")

        def watching(self, pointers, *arguments):
            size = pointers.get_element_ty().primitive_bitwidth // 8
            first = pointers.data[arguments[mask_at].data.astype(bool)].reshape(-1, 1)
            bytes_ = (first + np.arange(size, dtype=first.dtype)).ravel()
            if kind == "load" and reading_back and touched["store"]:
                bytes_ = np.setdiff1d(bytes_, np.concatenate(touched["store"]))
            touched[kind].append(bytes_)
            return method(self, pointers, *arguments)

        monkeypatch.setattr(InterpreterBuilder, f"create_masked_{kind}", watching)

    watch("load", 0)
    watch("store", 1)

    def run(function: Callable, *arguments, reads_back: bool = False, **options) -> int:
        for kind in touched.values():
            kind.clear()
        nonlocal reading_back
        reading_back = reads_back
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
@pytest.mark.parametrize(("count", "sites"), [(1, 1), (3, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_moves_what_is_stated(moved, dtype, count, sites) -> None:
    """One answer and one number of each token, and the rows finished since phase 1."""
    delta, bank, query, weight = _tensors(dtype)
    answers = torch.randn(sites, TOKENS, HIDDEN).to(dtype), torch.randn(sites, TOKENS)
    for fresh, late in product((False, True), (0, 1, 2)):
        where = {"row": count + late, "first": count, "position": sites - 1, "fresh": fresh}
        found = moved(phase_2, delta, bank, *answers, query, weight, **where, **EPS)
        assert found == traffic.phase_2(TOKENS, HIDDEN, dtype, fresh=fresh, late=late)


@watched
@pytest.mark.parametrize("few", [0, 128], ids=["in turns", "side by side"])
@pytest.mark.parametrize(("completes", "fresh"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("row", "sites"), [(0, 1), (3, 5)])
def test_phase_1_moves_what_is_stated(
    moved, row, sites, fresh, completes, few, monkeypatch
) -> None:
    """Each row once for all turns, and not a partial sum's for the later sites.

    Side by side, two launches touch together what one touches in turns.
    """
    dtype = torch.bfloat16
    monkeypatch.setattr(triton_phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: few})
    delta, bank, _, weight = _tensors(dtype)
    # Later turns read the new row again, if it is a block.
    reads_back = completes or few > 0
    where = {"row": row, "fresh": fresh, "completes": completes, "reads_back": reads_back}
    found = moved(phase_1, delta, bank, torch.randn(sites, HIDDEN), weight, **where, **EPS)
    assert found == traffic.phase_1(TOKENS, row, sites, HIDDEN, dtype, fresh=fresh)


@watched
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize(("row", "sites"), [(1, 2), (3, 9)])
def test_a_product_moves_what_is_stated(moved, row, sites, fresh, completes, monkeypatch) -> None:
    """Its three launches one by one; only the first reads back what it has written."""
    dtype, found = torch.bfloat16, []

    class Counted:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid):
            launch, reads_back = self.kernel[grid], not found
            return lambda **own: found.append(moved(launch, reads_back=reads_back, **own))

    for module, name in (
        *((score_group, "score_group_kernel"), (mix_group, "weigh_group_kernel")),
        (mix_group, "mix_group_kernel"),
    ):
        monkeypatch.setattr(module, name, Counted(getattr(module, name)))
    monkeypatch.setattr(triton_phase_1, "LEAST", {MAX_HIDDEN: Least(logits=1, sites=1)})
    delta, bank, _, weight = _tensors(dtype)
    where = {"row": row, "fresh": fresh, "completes": completes}
    phase_1(delta, bank, torch.randn(sites, HIDDEN), weight, **where, **EPS)
    shape = TOKENS, row, sites
    assert found == [
        traffic.score_group(*shape, HIDDEN, dtype, fresh=fresh),
        traffic.weigh_group(*shape, completes=completes),
        traffic.mix_group(*shape, HIDDEN, dtype, completes=completes),
    ]


def _vectors(count: Callable[..., int], *shape: object) -> float:
    """Bytes of a group in vectors, at so many tokens that queries, weights and sums vanish."""
    return count(10**6, *shape, 4096, torch.bfloat16) / (10**6 * 4096 * 2)


@pytest.mark.parametrize("sites", [2, 3, 8, 24])
@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_a_block_of_sites_in_vectors(blocks: int, sites: int) -> None:
    """The formulae of docs/measure/bytes.md."""
    rows = traffic.block_rows(blocks, sites)
    single = _vectors(traffic.single_pass_group, rows)
    assert single == pytest.approx(sites * (blocks + 4) - 2, rel=1e-4)
    # A float32 sum for a vector of 4096 halves, written and read: 1/1024 of a vector per answer.
    two_phase = _vectors(traffic.two_phase_group, rows)
    assert two_phase == pytest.approx(blocks + 6 * sites - 4 + (sites - 1) / 1024, rel=1e-4)


@pytest.mark.parametrize("sites", [1, 4, 12])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_group_of_single_sublayers_in_vectors(rows: int, sites: int) -> None:
    """Full AttnRes: every site finishes a row, and a merge reads those finished in its group."""
    group = [traffic.SiteRow(rows + i, fresh=True, completes=True) for i in range(sites)]
    single = _vectors(traffic.single_pass_group, group)
    assert single == pytest.approx(sites * (rows + 3) + sites * (sites - 1) / 2, rel=1e-4)
    two_phase = _vectors(traffic.two_phase_group, group)
    merges = 4 * (sites - 1) + (sites - 1) * (sites - 2) / 2
    sums = (sites - 1) / 1024
    assert two_phase == pytest.approx(rows + sites + 2 + merges + sums, rel=1e-4)


def _two_phase_over_single_pass(blocks: int, sites: int) -> float:
    """At 8192 tokens of 4096 halves."""
    shape = 8192, traffic.block_rows(blocks, sites), 4096, torch.bfloat16
    return traffic.two_phase_group(*shape) / traffic.single_pass_group(*shape)


def test_where_two_phase_moves_fewer_bytes() -> None:
    """From three finished blocks on, whatever the sites; below never."""
    for blocks, sites in product(range(1, 17), range(2, 200)):
        assert (_two_phase_over_single_pass(blocks, sites) < 1) == (blocks >= 3)


@pytest.mark.parametrize(
    ("blocks", "sites", "ratio"),
    [(2, 24, 1.00), (4, 2, 0.86), (4, 8, 0.77), (9, 8, 0.52), (9, 24, 0.48)],
)
def test_ratios_of_the_documentation(blocks: int, sites: int, ratio: float) -> None:
    """Two-phase over single pass."""
    assert round(_two_phase_over_single_pass(blocks, sites), 2) == ratio
