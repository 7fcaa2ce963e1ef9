"""The single-pass Triton kernel against the float64 run of its specification."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS, half_ulp
from torch import Tensor
from triton_cases import Spy, cases, in_turn, zeros
from triton_interpreter import (
    DEVICE,
    ON_GPU,
    RUNNABLE,
    bits,
    interpreter,  # noqa: F401
    passes_in_a_process_of_its_own,
    poisoned,
)

from attnres_serve.kernels import reference
from attnres_serve.kernels.triton import common
from attnres_serve.kernels.triton import single_pass as triton_single_pass
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.single_pass import single_pass

pytestmark = pytest.mark.usefixtures("interpreter")

HIDDEN = (1, 3, 64, 96, 257, 1000, 4097)

# Error before the last rounding, in units of 2^-24 times the condition of the result (see
# _tolerance).  Seen in the interpreter: up to 1.3 in 557 cases; a GPU's exp2 and rsqrt add up to
# two units each.
FLOAT32_ROUNDINGS = 4.0


@dataclass(frozen=True)
class Case:
    """One launch: ``row + 1`` sources of ``tokens`` x ``hidden``, and how they are laid out."""

    tokens: int
    row: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    fresh: bool = False
    layout: str = "dense"
    spare: int = 1
    scale: float = 1.0
    query_scale: float = 1.0
    weight_dtype: torch.dtype | None = None
    bias: float | None = None
    seed: int = 0


def _random(generator: torch.Generator, case: Case, *shape: int) -> Tensor:
    """Normal values cut at three sigma, so that fp16 at scale 1e4 cannot overflow in one sum."""
    values = torch.randn(*shape, generator=generator).clamp(-3, 3) * case.scale
    return values.to(case.dtype).to(DEVICE)


def _compare(case: Case) -> None:
    """Run the kernel on a case and hold state, untouched memory and result to the reference."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.tokens, case.row + 1 + case.spare, case.hidden)
    bank_storage, bank = poisoned(shape, case.layout, case.dtype)
    _, delta = poisoned((case.tokens, case.hidden), case.layout, case.dtype)
    out_storage, out = poisoned((case.tokens, case.hidden), case.layout, case.dtype)
    used = case.row if case.fresh else case.row + 1  # a fresh row holds NaN until it is written
    bank[:, :used] = _random(generator, case, case.tokens, used, case.hidden)
    delta.copy_(_random(generator, case, case.tokens, case.hidden))
    query = torch.randn(case.hidden, generator=generator).to(DEVICE) * case.query_scale
    norm_weight = torch.randn(case.hidden, generator=generator).to(DEVICE)
    norm_weight = norm_weight.to(case.weight_dtype or case.dtype)

    bias = None if case.bias is None else torch.tensor([case.bias], device=DEVICE)

    blocks = [bank[:, i].clone() for i in range(case.row)]
    before = None if case.fresh else bank[:, case.row].clone()
    partial = reference.add_partial(before, delta)
    mixed, _ = reference.mix([*blocks, partial], query, KEY_EPS, torch.float64, bias)
    expected = reference.rms_norm(mixed, norm_weight, NORM_EPS)
    expected_storage = bank_storage.clone()
    expected_view = expected_storage.as_strided(bank.shape, bank.stride(), bank.storage_offset())
    expected_view[:, case.row] = partial
    delta_before = delta.clone()

    returned = single_pass(
        delta,
        bank,
        query,
        norm_weight,
        row=case.row,
        fresh=case.fresh,
        key_eps=KEY_EPS,
        norm_eps=NORM_EPS,
        bias=bias,
        out=out,
    )

    assert returned is out
    assert torch.equal(bits(bank_storage), bits(expected_storage)), "state or untouched rows"
    assert torch.equal(bits(delta), bits(delta_before))
    if case.tokens == 0:
        return
    assert int(out_storage.isnan().sum()) == out_storage.numel() - out.numel(), "padding or holes"
    tolerance = _tolerance([*blocks, partial], query, norm_weight, mixed, expected, case.dtype)
    worst = ((out.double() - expected).abs() / tolerance).max()
    assert worst <= 1, f"{float(worst):.3g} times the tolerance"


def _tolerance(
    sources: list[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    mixed: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """How far a float32 computation with one final rounding may be from the exact result.

    The rounding is wrong by half a unit in the last place.  Before it, a score carries an absolute
    error that grows with its own size (product, root, exponential) and with the root of the summed
    squares of its terms (rounding errors of a sum add like a random walk); a weight inherits that
    as a relative error, the mix inherits it times the largest source, and the norm divides by the
    root mean square of the mix, which cancellation may have made small.
    """
    stacked = torch.stack(sources, dim=1).double()  # [T, n, d]
    rms = (stacked.square().mean(-1) + KEY_EPS).sqrt()
    terms = (stacked * query.double()).square().sum(-1).sqrt() / rms
    score = reference.scores(stacked, query.double(), KEY_EPS).abs()
    condition = 1 + (terms + score).amax(1)
    gain = norm_weight.double().abs().max() / (mixed.square().mean(-1) + NORM_EPS).sqrt()
    float32 = FLOAT32_ROUNDINGS * 2**-24 * condition * stacked.abs().amax((1, 2)) * gain
    return half_ulp(expected, dtype) + float32[:, None]


@settings(max_examples=60, deadline=None)
@given(
    cases(
        Case,
        row=st.integers(0, 15),
        hidden=st.sampled_from(HIDDEN),
        fresh=st.booleans(),
        weight_dtype=st.sampled_from((None, *DTYPES)),
        bias=st.sampled_from((None, 0.7, -3.0)),
    )
)
def test_single_pass_over_the_grid(case: Case) -> None:
    """Any mix of shape, dtype, layout and magnitude."""
    _compare(case)


ROWS = [
    # One source: its weight is exactly one and the loop does not run.
    Case(5, 0, 257, fresh=True),
    Case(5, 0, 257),
    # The second source: one masked lane in a tile of two.
    Case(5, 1, 96),
    # A full and a partly filled last tile.
    Case(5, 2, 96),
    Case(5, 3, 96, fresh=True),
    # Full AttnRes depth, more tokens than any other row here.
    Case(17, 15, 64),
    # Hidden size one: the norm leaves the sign only, unit strides everywhere.
    Case(5, 3, 1),
    # Fewer elements than a warp has lanes.
    Case(5, 3, 3, layout="padded"),
    # One element more than a power of two: nearly half of the block is masked.
    Case(1, 4, 4097, layout="padded"),
    # The largest block of the table.
    Case(1, 2, 7168),
    # Not dense: padded rows and slots, and a bank with slots outermost.
    Case(5, 4, 1000, layout="padded", fresh=True),
    Case(5, 4, 1000, layout="slots first"),
    # No slot behind the row, so that a read past it would leave the bank.
    Case(5, 4, 257, spare=0),
    # Zero query: equal scores, a plain mean.
    Case(5, 8, 257, query_scale=0.0),
    # Sharp: scores of several tens, one weight takes all, others underflow.
    Case(5, 8, 257, query_scale=4.0),
    # Magnitudes at which a mean square overflows fp16 and at which eps outweighs it.
    Case(5, 4, 257, scale=1e4),
    Case(5, 4, 257, scale=1e-4),
    Case(5, 4, 257, scale=1e-6),
    # A recency bias that all but selects, and one that all but hides, the partial sum.
    Case(5, 4, 257, bias=9.0),
    Case(5, 4, 257, bias=-9.0, fresh=True),
    # Norm weight kept in float32 beside half activations, as some families do.
    Case(5, 4, 257, weight_dtype=torch.float32),
    # Nothing to do.
    Case(0, 3, 64),
]
WIDE_ROWS = [Case(5, 4, 257, scale=1e15), Case(5, 4, 257, scale=1e-20)]  # beyond half precision
EVERY = in_turn(ROWS) + in_turn(WIDE_ROWS, (torch.float32, torch.bfloat16))


@pytest.mark.parametrize(
    "case", EVERY, ids=lambda case: "-".join(str(v) for v in vars(case).values())
)
def test_single_pass_rows(case: Case) -> None:
    """Hand-picked rows; the comments say what each stresses."""
    _compare(case)


def _arguments(**changes: object) -> dict[str, object]:
    """Valid arguments of a small launch, with changes."""
    generator = torch.Generator().manual_seed(1)
    arguments: dict[str, object] = {
        "delta": torch.randn(4, 96, generator=generator).to(torch.bfloat16).to(DEVICE),
        "bank": torch.randn(4, 5, 96, generator=generator).to(torch.bfloat16).to(DEVICE),
        "query": torch.randn(96, generator=generator).to(DEVICE),
        "norm_weight": torch.randn(96, generator=generator).to(torch.bfloat16).to(DEVICE),
        "row": 3,
        "fresh": False,
        "key_eps": KEY_EPS,
        "norm_eps": NORM_EPS,
    }
    return arguments | changes


def test_a_dominating_score_selects_its_source() -> None:
    """A source along a long query takes the whole weight, in the loop and in the partial sum."""
    for chosen in (0, 2, 3):
        arguments = _arguments()
        arguments["query"] *= 50
        arguments["bank"][:, chosen] = (arguments["query"] / 50).to(torch.bfloat16)
        if chosen == 3:
            arguments["delta"].zero_()
        source = arguments["bank"][:, chosen].double()
        out = single_pass(**arguments)
        expected = reference.rms_norm(source, arguments["norm_weight"], NORM_EPS)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-20)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """The config does not depend on T, so a token alone gets the bits it gets among others."""
    together = _arguments()
    alone = _arguments()
    alone["delta"], alone["bank"] = alone["delta"][2:3], alone["bank"][2:3]
    assert torch.equal(single_pass(**together)[2:3], single_pass(**alone))


@pytest.mark.parametrize("config", [(1, 1), (2, 2), (4, 4)], ids=str)
def test_configs_agree(config: tuple[int, int]) -> None:
    """Tiles that divide the number of sources, do not, and exceed it."""
    expected = single_pass(**_arguments())
    actual = single_pass(**_arguments(config=common.Config(*config)))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-20)


def test_out_is_allocated_dense() -> None:
    """A padded delta does not give a padded result."""
    wide = torch.randn(4, 100).to(torch.bfloat16).to(DEVICE)
    out = single_pass(**_arguments(delta=wide[:, :96]))
    assert out.is_contiguous() and out.dtype == torch.bfloat16 and out.shape == (4, 96)


def test_one_launch_and_none_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site is one launch of one program per token; no tokens, no launch."""
    monkeypatch.setattr(triton_single_pass, "site_kernel", spy := Spy())
    single_pass(**_arguments())
    assert spy.grids == [(4,)]
    empty = _arguments()
    empty["delta"], empty["bank"] = empty["delta"][:0], empty["bank"][:0]
    assert single_pass(**empty).shape == (0, 96)
    assert spy.grids == [(4,)]


@pytest.mark.parametrize("hidden", [96, 1024, 4096, 7168, MAX_HIDDEN])
def test_few_tokens_have_configs_of_their_own(monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    """But not where each token is taken alone, and not in a merge."""
    few = triton_single_pass.site_config(hidden, 128, True)
    many = triton_single_pass.site_config(hidden, 129, True)
    assert many == common.config_for(hidden)
    assert (few != many) == (512 < hidden <= 8192) and few.tile >= many.tile
    merges = {triton_single_pass.site_config(hidden, tokens, False) for tokens in (1, 129)}
    assert len(merges) == 1
    monkeypatch.setattr(common, "_each_token_alone", True)
    assert triton_single_pass.site_config(hidden, 128, True) == many


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"weight_dtype": torch.float32},
        {"hidden": 2048},
        {"answers": True},
        {"bias": True},
        {"fresh": True},
        {"early": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_many_tokens_compile_what_few_need(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    """Once for each kind of launch, and without a launch."""
    monkeypatch.setattr(triton_single_pass, "site_kernel", spy := Spy())
    monkeypatch.setattr(common, "_compiled", set())

    def run(
        tokens: int = 129,
        hidden: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.bfloat16,
        answers: bool = False,
        bias: bool = False,
        fresh: bool = False,
        early: bool = False,
    ) -> list[tuple[int, ...]]:
        spy.grids.clear()
        monkeypatch.setattr(triton_single_pass, "starts_early", lambda device: early)
        bank = zeros(tokens, 5, hidden, dtype=dtype)
        triton_single_pass.launch(
            *(bank[:, 4].clone(), bank, zeros(hidden, dtype=torch.float32)),
            zeros(hidden, dtype=weight_dtype),
            zeros(1, dtype=torch.float32) if bias else None,
            torch.empty_like(bank[:, 4]),
            answers=(bank.transpose(0, 1), zeros(5, tokens)) if answers else None,
            **{"row": 3, "fresh": fresh, "key_eps": KEY_EPS, "norm_eps": NORM_EPS},
        )
        return spy.grids

    assert run(tokens=128) == [(128,)]
    for kind in ({}, other):
        assert run(**kind) == [(0,), (129,)] and run(**kind) == [(129,)]
        assert run(tokens=128, **kind) == [(128,)]
    assert run() == [(129,)]


REFUSALS = {
    "delta of three dimensions": (
        lambda: {"delta": zeros(4, 1, 96)},
        r"delta must be \[tokens, hidden\] and bank \[tokens, slots, hidden\], not \[4, 1, 96\]",
    ),
    "other tokens": (lambda: {"bank": zeros(3, 5, 96)}, r"bank \[3, 5, 96\] does not fit delta"),
    "other hidden size": (lambda: {"bank": zeros(4, 5, 95)}, "does not fit delta"),
    "hidden size zero": (
        lambda: {"delta": zeros(4, 0), "bank": zeros(4, 5, 0)},
        "hidden size 0 is outside",
    ),
    "hidden size too large": (
        lambda: {"delta": zeros(1, MAX_HIDDEN + 1), "bank": zeros(1, 4, MAX_HIDDEN + 1)},
        f"hidden size {MAX_HIDDEN + 1} is outside 1..{MAX_HIDDEN}",
    ),
    "row behind the bank": (lambda: {"row": 5}, "row 5 is outside the 5 slots of the bank"),
    "negative row": (lambda: {"row": -1}, "row -1 is outside"),
    "integer delta": (lambda: {"delta": zeros(4, 96, dtype=torch.int32)}, "delta is torch.int32"),
    "double delta": (lambda: {"delta": zeros(4, 96, dtype=torch.float64)}, "torch.float64, not"),
    "bank of another dtype": (
        lambda: {"bank": zeros(4, 5, 96, dtype=torch.float16)},
        "bank is torch.float16 but delta is torch.bfloat16",
    ),
    "query not in float32": (lambda: {"query": zeros(96)}, "query is torch.bfloat16; it is fold"),
    "bias of another size": (
        lambda: {"bias": zeros(2, dtype=torch.float32)},
        r"bias is \[2\] torch.float32, not \[1\] torch.float32",
    ),
    "bias in a half": (lambda: {"bias": zeros(1)}, r"bias is \[1\] torch.bfloat16, not"),
    "integer weight": (
        lambda: {"norm_weight": zeros(96, dtype=torch.int8)},
        "norm_weight is torch.int8",
    ),
    "query of another size": (
        lambda: {"query": zeros(95, dtype=torch.float32)},
        r"query is \[95\], not \[96\]",
    ),
    "weight of two dimensions": (
        lambda: {"norm_weight": zeros(1, 96)},
        r"norm_weight is \[1, 96\], not \[96\]",
    ),
    "out of another shape": (lambda: {"out": zeros(4, 95)}, r"out is \[4, 95\] torch.bfloat16"),
    "out of another dtype": (
        lambda: {"out": zeros(4, 96, dtype=torch.float32)},
        r"out is \[4, 96\] torch.float32 but delta",
    ),
    "query elsewhere": (
        lambda: {"query": torch.empty(96, device="meta")},
        f"query is on meta but delta on {DEVICE}",
    ),
    "strided delta": (lambda: {"delta": zeros(4, 192)[:, ::2]}, "delta must have unit stride"),
    "strided bank": (lambda: {"bank": zeros(4, 5, 192)[..., ::2]}, "bank must have unit stride"),
    "strided query": (
        lambda: {"query": zeros(192, dtype=torch.float32)[::2]},
        "query must have unit stride",
    ),
    "strided out": (lambda: {"out": zeros(4, 192)[:, ::2]}, "out must have unit stride"),
    "expanded bank": (
        lambda: {"bank": zeros(1, 5, 96).expand(4, 5, 96)},
        "bank is written and its rows overlap",
    ),
    "overlapping slots": (
        lambda: {"bank": zeros(4 * 5 * 96).as_strided((4, 5, 96), (480, 95, 1))},
        "bank is written and its rows overlap",
    ),
    "expanded out": (
        lambda: {"out": zeros(1, 96).expand(4, 96)},
        "out is written and its rows overlap",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken contract is named before anything is launched."""
    changes, sentence = REFUSALS[name]
    monkeypatch.setattr(triton_single_pass, "site_kernel", None)
    kind = TypeError if " is torch." in sentence or "float64" in sentence else ValueError
    kind = ValueError if name.startswith(("out", "bias")) else kind
    with pytest.raises(kind, match=sentence):
        single_pass(**_arguments(**changes()))


@pytest.mark.parametrize("name", ["delta", "bank"])
def test_refuses_an_out_that_shares_memory(name: str) -> None:
    """Writing the result must not change what another program still reads."""
    arguments = _arguments()
    shared = arguments[name] if name == "delta" else arguments[name][:, 4]
    with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
        single_pass(**arguments, out=shared)


@pytest.mark.skipif(ON_GPU, reason="needs tensors without a Triton backend")
def test_refuses_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names both ways out."""
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match="torch path, or set TRITON_INTERPRET=1 before"):
        single_pass(**_arguments())


if not RUNNABLE:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_single_pass_in_a_process_of_its_own() -> None:
        """Triton was imported here without the interpreter: all tests above run in a child."""
        passes_in_a_process_of_its_own(__file__)
