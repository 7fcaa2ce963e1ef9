"""Every backend, through the functions that sites call, against the reference in float64."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, Case, check_normed, every_row
from torch import Tensor

from attnres_serve.kernels import backends, cpp_backend
from attnres_serve.kernels.backends import SiteWeights

LOGIT_SCALE = 1.25


@pytest.fixture(params=["cpp", "torch"])  # triton's functions are others
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return backends.load(request.param)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that an operator allocates holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def site(case: Case, dtype: torch.dtype, number: int = 0) -> SiteWeights:
    generator = torch.Generator().manual_seed(case.seed + 7)
    key_norms = 0.5 + torch.rand((number + 1, case.hidden), generator=generator)
    query = case.queries(number + 1)[number]
    key = query, key_norms[number], LOGIT_SCALE, KEY_EPS, None
    return SiteWeights(*key, case.norm_weight(dtype), NORM_EPS)


def folded(weights: SiteWeights) -> Tensor:
    return weights.query * weights.key_norm * weights.logit_scale


def split(last: Tensor) -> tuple[Tensor, Tensor]:
    """A partial sum and a sublayer's output for it, not exact in their sum."""
    partial = (0.7 * last.float()).to(last.dtype)
    return partial, (last.float() - 0.6 * partial.float()).to(last.dtype)


@every_row
def test_single_pass(
    case: Case, dtype: torch.dtype, backend: ModuleType, unwritten: Callable[..., None]
) -> None:
    """With a partial sum and without; the new partial sum is exact."""
    *blocks, last = case.sources(dtype)
    weights, (partial, delta) = site(case, dtype), split(last)
    unwritten(*blocks, last, partial, delta, *weights[:2])
    normed, updated = backend.single_pass(blocks, None, last, weights)
    assert updated is last
    check_normed(normed, [*blocks, last], folded(weights), weights.norm_weight)
    normed, updated = backend.single_pass(blocks, partial, delta, weights)
    assert torch.equal(updated, partial + delta)
    check_normed(normed, [*blocks, updated], folded(weights), weights.norm_weight)


@every_row
@pytest.mark.parametrize("sites", [1, 6])
def test_two_phase(
    case: Case,
    dtype: torch.dtype,
    sites: int,
    backend: ModuleType,
    unwritten: Callable[..., None],
) -> None:
    """The first site reads blocks only, the others merge a partial sum, new or grown."""
    blocks = case.sources(dtype)
    (last,) = Case(tokens=case.tokens, count=1, hidden=case.hidden, seed=5).sources(dtype)
    last = case.scale * last
    partial, delta = split(last)
    all_weights = [site(case, dtype, number) for number in range(sites)]
    unwritten(*blocks, last, partial, delta)
    answers = backend.inter_block(blocks, all_weights)
    for position, weights in enumerate(all_weights):
        query, norm_weight = folded(weights), weights.norm_weight
        normed = backend.norm_answer(answers, position, weights, last)
        check_normed(normed, blocks, query, norm_weight)
        normed, updated = backend.merge(answers, position, None, last, weights)
        assert updated is last
        check_normed(normed, [*blocks, last], query, norm_weight)
        normed, updated = backend.merge(answers, position, partial, delta, weights)
        assert torch.equal(updated, partial + delta)
        check_normed(normed, [*blocks, updated], query, norm_weight)


@pytest.mark.parametrize("copies", [2, 5])
def test_a_recency_bias_of_log_n_is_n_copies_of_the_last_source(
    backend: ModuleType, copies: int
) -> None:
    """In both algorithms, with a new partial sum and with one that grew."""
    case = Case(count=4)
    *blocks, last = case.sources(torch.float32)
    partial, delta = split(last)
    weights = site(case, torch.float32)._replace(bias=torch.tensor([float(copies)]).log())
    answers = backend.inter_block(blocks, [weights])
    for normed, updated in (
        backend.single_pass(blocks, None, last, weights),
        backend.single_pass(blocks, partial, delta, weights),
        backend.merge(answers, 0, None, last, weights),
        backend.merge(answers, 0, partial, delta, weights),
    ):
        sources = [*blocks, *[updated] * copies]
        check_normed(normed, sources, folded(weights), weights.norm_weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_packed_state(backend: ModuleType, dtype: torch.dtype) -> None:
    """Sources as a pipeline stage receives them: rows of one tensor, so far apart in memory."""
    case = Case(count=5, tokens=7, hidden=48)
    packed = torch.stack(case.sources(dtype), dim=1)
    *blocks, partial = packed.unbind(dim=1)
    assert not partial.is_contiguous()
    weights = site(case, dtype)
    normed, updated = backend.single_pass(blocks, partial, partial, weights)
    assert torch.equal(updated, partial + partial)
    check_normed(normed, [*blocks, updated], folded(weights), weights.norm_weight)
    answers = backend.inter_block(blocks, [weights])
    normed, updated = backend.merge(answers, 0, partial, partial, weights)
    check_normed(normed, [*blocks, updated], folded(weights), weights.norm_weight)


@pytest.mark.parametrize("hidden", [64, 66])
def test_threads_share_out_the_tokens(backend: ModuleType, hidden: int) -> None:
    """Enough tokens for every thread, and a last share that is smaller."""
    case = Case(count=6, tokens=1003, hidden=hidden)
    *blocks, last = case.sources(torch.bfloat16)
    weights = site(case, torch.bfloat16)
    normed, _ = backend.single_pass(blocks, None, last, weights)
    check_normed(normed, [*blocks, last], folded(weights), weights.norm_weight)


def test_the_cpp_backend_is_batch_invariant() -> None:
    """Bit for bit the same numbers, whatever else is in the batch, in both algorithms."""
    backend = backends.load("cpp")
    case = Case(count=6, tokens=1003)
    *blocks, last = case.sources(torch.bfloat16)
    weights, (partial, delta) = site(case, torch.bfloat16), split(last)

    def run(chosen: slice) -> list[Tensor]:
        some = [block[chosen] for block in blocks]
        answers = backend.inter_block(some, [weights] * 5)
        return [
            backend.single_pass(some, partial[chosen], delta[chosen], weights)[0],
            backend.merge(answers, 4, partial[chosen], delta[chosen], weights)[0],
            backend.norm_answer(answers, 2, weights, delta),
        ]

    together = run(slice(None))
    for token in (0, 501, 1002):
        for whole, alone in zip(together, run(slice(token, token + 1)), strict=True):
            assert torch.equal(whole[token], alone[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(backend: ModuleType, value: float) -> None:
    """A source that overflowed poisons its token, and that token alone."""
    for dtype in DTYPES:
        case = Case(count=4, tokens=3)
        *blocks, last = case.sources(dtype)
        last[1, 5] = value
        normed, _ = backend.single_pass(blocks, None, last, site(case, dtype))
        assert normed[1].isnan().any()
        assert normed[[0, 2]].isfinite().all()


def test_compiled(backend: ModuleType) -> None:
    """Both algorithms in one graph for any number of tokens."""

    def run(
        blocks: list[Tensor], partial: Tensor, delta: Tensor, weights: SiteWeights
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        answers = backend.inter_block(blocks, [weights, weights])
        return (
            backend.single_pass(blocks, partial, delta, weights),
            backend.merge(answers, 1, partial, delta, weights),
            backend.merge(answers, 0, None, delta, weights),
        )

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for tokens in (5, 33):
        case = Case(tokens=tokens, count=4)
        *blocks, last = case.sources(torch.bfloat16)
        weights, (partial, delta) = site(case, torch.bfloat16), split(last)
        single, grown, fresh = compiled(blocks, partial, delta, weights)
        for normed, updated in (single, grown):
            assert torch.equal(updated, partial + delta)
            check_normed(normed, [*blocks, updated], folded(weights), weights.norm_weight)
        check_normed(fresh[0], [*blocks, delta], folded(weights), weights.norm_weight)


def test_operators_keep_the_rules_of_torch() -> None:
    """Schemas, fakes and dispatch of every operator, as torch's own check sees them."""
    backends.load("cpp")
    case = Case(count=4, tokens=6)
    *blocks, last = case.sources(torch.bfloat16)
    partial, delta = split(last)
    weights = site(case, torch.bfloat16)
    operators = torch.ops.attnres_serve
    phase_1 = blocks, [weights.query], [weights.key_norm], LOGIT_SCALE, KEY_EPS
    answers = operators.inter_block(*phase_1)
    for operator, inputs in [
        (operators.mix_norm, ([*blocks, last], *weights)),
        (operators.add_mix_norm, (blocks, partial, delta, *weights)),
        (operators.inter_block, phase_1),
        (operators.merge_norm, (*answers, 0, last, *weights)),
        (operators.add_merge_norm, (*answers, 0, partial, delta, *weights)),
    ]:
        torch.library.opcheck(operator.default, inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blocks: [blocks[0][:, :-1], *blocks[1:]], "one size and dtype"),
        (lambda blocks: [blocks[0][:-1], *blocks[1:]], "one size and dtype"),
        (lambda blocks: [blocks[0].float(), *blocks[1:]], "one size and dtype"),
        (lambda blocks: [blocks[0].t().contiguous().t(), *blocks[1:]], "contiguous"),
    ],
)
def test_operators_refuse_what_they_would_misread(change, message: str) -> None:
    backends.load("cpp")
    case = Case(count=3, tokens=65)
    *blocks, last = case.sources(torch.bfloat16)
    with pytest.raises(RuntimeError, match=message):
        cpp_backend.single_pass(change(blocks), None, last, site(case, torch.bfloat16))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda sources, weights: ([], *weights), "at least one source"),
        (
            lambda sources, weights: (sources, *weights._replace(query=weights.query[:16])),
            "key_norm|one element for each|must be",
        ),
        (
            lambda sources, weights: (sources, *weights._replace(norm_weight=torch.ones(3))),
            "must be",
        ),
    ],
)
def test_operators_read_nothing_beyond_their_arguments(inputs, message: str) -> None:
    backends.load("cpp")
    case = Case(count=3, hidden=64)
    arguments = inputs(case.sources(torch.bfloat16), site(case, torch.bfloat16))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.attnres_serve.mix_norm(*arguments)


LOAD = """
from attnres_serve.kernels import backends, cpp_backend
try:
    backends.load("cpp")
    backends.load("cpp")
    import torch
    print(torch.ops.attnres_serve.mix_norm.default)
except backends.BackendError as error:
    print(error)
"""


def load_in_processes(count: int, **env: str) -> list[str]:
    """What processes that load the backend at the same time print."""
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [subprocess.Popen(command, env=os.environ | env, **options) for _ in range(count)]
    return [child.communicate(timeout=240)[0].strip() for child in children]


def test_a_cold_cache_and_a_damaged_library(tmp_path: Path) -> None:
    """Workers that start together compile once; a library that cannot be loaded is made anew."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert load_in_processes(2, **cache) == ["attnres_serve.mix_norm.default"] * 2
    (library,) = (tmp_path / "attnres_serve").glob("*.so")
    made = library.stat().st_ino
    assert load_in_processes(1, **cache) == ["attnres_serve.mix_norm.default"]
    assert library.stat().st_ino == made
    library.write_bytes(b"no library")
    assert load_in_processes(1, **cache) == ["attnres_serve.mix_norm.default"]
    assert library.stat().st_size > 1000


def test_what_keeps_the_backend_from_running(tmp_path: Path) -> None:
    """One sentence that says what to do; nothing is left half-made."""
    (said,) = load_in_processes(1, XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler")
    assert "could not be compiled" in said and "install a C++ compiler" in said
    assert "\n" not in said
    assert not list((tmp_path / "attnres_serve").glob("*.so"))
    file = tmp_path / "file"
    file.touch()
    (said,) = load_in_processes(1, XDG_CACHE_HOME=str(file))
    assert "no place for its library" in said and "XDG_CACHE_HOME" in said
    assert "\n" not in said
