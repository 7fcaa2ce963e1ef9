"""Inputs on which every implementation of depth attention is compared with the float64 reference,
and what it may differ by."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import MASKED

KEY_EPS, NORM_EPS = 1e-6, 1e-5
# A float32 rounding is 2^-24; so many of them may add up in roots, exponentials and trees of sums.
ROUNDINGS = 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _some(count: int, generator: torch.Generator) -> Tensor:
    masked = torch.rand(count, generator=generator) < 0.5
    masked[torch.randint(count, (), generator=generator)] = False
    return masked


# Which of a site's sources are not read.
MASKS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "some": _some,
    "blocks": lambda count, _: torch.arange(count) < count - 1,
    "last": lambda count, _: torch.arange(count) == count - 1,
    "all but the first": lambda count, _: torch.arange(count) > 0,
    "all but the middle": lambda count, _: torch.arange(count) != count // 2,
}


@dataclass(frozen=True)
class Case:
    """A row of a table; every field is something that can go wrong."""

    tokens: int = 5
    count: int = 3  # sources
    hidden: int = 65
    scale: float = 1.0
    query_scale: float = 0.3
    bias: float | str | None = None  # the size of random ones, or the key of ``MASKS``
    norm_dtype: torch.dtype | None = None  # that of the sources if None
    seed: int = 0
    device: str = "cpu"

    def sources(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.count, self.tokens, self.hidden)
        return list((self.scale * torch.randn(shape, generator=generator)).to(self.device, dtype))

    def queries(self, count: int = 1) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        drawn = torch.randn((count, self.hidden), generator=generator)
        return list((self.query_scale * drawn).to(self.device))

    def biases(self, count: int, sources: int) -> list[Tensor | None]:
        """Of so many sites, ``[sources]`` each."""
        if self.bias is None:
            return [None] * count
        generator = torch.Generator().manual_seed(self.seed + 3)
        size = 0.7 if isinstance(self.bias, str) else self.bias
        drawn = size * torch.randn((count, sources), generator=generator)
        if isinstance(self.bias, str):
            masked = torch.stack([MASKS[self.bias](sources, generator) for _ in range(count)])
            if sources > 1:  # one at least is read
                drawn[masked] = MASKED
        return list(drawn.to(self.device))

    def norm_weight(self, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2)
        weight = 1 + 0.3 * torch.randn(self.hidden, generator=generator)
        return weight.to(self.device, self.norm_dtype or dtype)


ROWS = [
    # One source: its weight is one whatever the score.
    Case(count=1),
    Case(count=2, tokens=1),
    Case(count=3, tokens=33),
    # Both sides of MAX_UNROLLED.
    Case(count=16, tokens=5, hidden=31),
    Case(count=17, tokens=5, hidden=31),
    Case(count=20, tokens=1, hidden=129),
    # The smallest hidden size, and sizes that fill no vector register.
    Case(hidden=1),
    Case(hidden=3, count=9),
    Case(hidden=257, count=4),
    # A batch without tokens.
    Case(tokens=0),
    Case(tokens=0, count=17),
    # Zero query: a plain mean.
    Case(query_scale=0.0, count=7),
    # Scores of about a hundred: one weight is one, the exponentials of the others underflow.
    Case(query_scale=12.0, count=7),
    # Sums of squares far from one, in both directions; at the small ones eps decides.
    Case(scale=1e4, count=5),
    Case(scale=1e-4, count=5),
    Case(scale=1e-6, count=5),
]
# A bias for every source: of all sizes, and with sources that are not read.
BIASED = [
    *(Case(count=5, bias=bias) for bias in (0.7, 30.0, 200.0)),
    *(Case(count=count, bias=bias) for count in (2, 5) for bias in MASKS),
    *(Case(count=17, hidden=31, bias=bias) for bias in ("some", "blocks", 0.7)),
    Case(count=1, bias="some"),
    Case(count=4, bias="some", scale=1e4),
    Case(count=4, bias="blocks", query_scale=12.0),
]
ROWS += BIASED
# Beyond the range of half precision.
WIDE_ROWS = [Case(scale=1e15, count=5), Case(scale=1e-20, count=5)]
EVERY = [
    *((row, dtype) for row in ROWS for dtype in DTYPES),
    *((row, dtype) for row in WIDE_ROWS for dtype in (torch.float32, torch.bfloat16)),
]


def identify(value: object) -> str:
    if isinstance(value, Case):
        default = Case()
        changed = {k: v for k, v in vars(value).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "plain"
    return str(value).removeprefix("torch.")


every_row = pytest.mark.parametrize(("case", "dtype"), EVERY, ids=identify)


def mix_error(sources: list[Tensor], query: Tensor, bias: Tensor | None = None) -> Tensor:
    """How far a mix computed in float32 may be from the exact one, ``[T, 1]``.

    A score's error grows with its own size and with the root of the summed squares of its terms; a
    weight inherits it relatively, the mix inherits that times the largest source.  A library for
    matrix products may add ``d`` terms one after the other, and the roundings of partial sums add
    up like a random walk of 0.4 sqrt(d) steps (some processors' do): four times that is allowed.
    """
    stacked = torch.stack(sources, dim=1).double()
    rms = (stacked.square().mean(-1) + KEY_EPS).sqrt()
    terms = (stacked * query.double()).square().sum(-1).sqrt() / rms
    score = reference.scores(stacked, query.double(), KEY_EPS).abs()
    condition = 1 + (terms + score).amax(1, keepdim=True)
    if bias is not None:
        condition += bias.where(bias > MASKED, 0.0).abs().max()
    roundings = ROUNDINGS + 1.6 * query.numel() ** 0.5
    return roundings * 2**-24 * condition * stacked.abs().amax((1, 2))[:, None]


def check_mix(
    actual: Tensor, sources: list[Tensor], query: Tensor, bias: Tensor | None = None
) -> None:
    """A float32 mix is within the error of its own arithmetic; nothing was rounded to a half."""
    assert actual.dtype == torch.float32
    expected, _ = reference.mix(sources, query, KEY_EPS, torch.float64, bias)
    if actual.numel():
        assert ((actual.double() - expected).abs() / mix_error(sources, query, bias)).max() <= 1


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What one rounding to ``dtype`` may change."""
    limits = torch.finfo(dtype)
    return values.abs().clamp(min=limits.smallest_normal) * (limits.eps / 2)


def rounding_of_the_answer(
    sources: list[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    finished: int,
    bias: Tensor | None = None,
) -> Tensor:
    """What it may cost that the answer was rounded to the dtype of the sources, ``[T, d]``.

    Beside a partial sum of weight w the mix moves by (1 - w) times half a unit of the answer, and
    by its root mean square the norm's factor.
    """
    mixed, weights = reference.mix(sources, query, KEY_EPS, torch.float64, bias)
    rest = weights[:, :finished].sum(-1, keepdim=True)
    own = None if bias is None else bias[:finished]
    answer, _ = reference.mix(sources[:finished], query, KEY_EPS, torch.float64, own)
    moved = rest * half_ulp(answer, sources[0].dtype)
    factor = (mixed.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    relative = factor * moved.square().mean(-1, keepdim=True).sqrt()
    second_order = 1 + 3 * relative
    return norm_weight.double().abs() * factor * (moved + mixed.abs() * relative) * second_order


def check_normed(
    actual: Tensor,
    sources: list[Tensor],
    query: Tensor,
    weight: Tensor,
    answered: int = 0,
    bias: Tensor | None = None,
) -> None:
    """A normed mix: one rounding to the dtype beside the error of the mix under the norm's gain.

    Another one where an answer, rounded to the dtype, stands for the first ``answered`` sources.
    """
    dtype = sources[0].dtype
    assert actual.dtype == dtype and actual.shape == sources[0].shape
    if not actual.numel():
        return
    mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64, bias)
    expected = reference.rms_norm(mixed, weight.double(), NORM_EPS)
    gain = weight.double().abs().max() / (mixed.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    tolerance = half_ulp(expected, dtype) + gain * mix_error(sources, query, bias)
    if answered:
        tolerance += rounding_of_the_answer(sources, query, weight, answered, bias)
    assert ((actual.double() - expected).abs() / tolerance).max() <= 1
