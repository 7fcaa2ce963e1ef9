"""The gate before every measurement: each site of each contender against the float64 reference.

A result may differ by its final rounding, by that of each intermediate value that a contender keeps
in the activation dtype, and by the arithmetic in float32.  A mix is a convex combination of its
sources, so an intermediate value is no larger than the largest source and rounding it costs at most
that times the unit roundoff; the norm behind it scales both.  The partial sum that a contender
stores must equal the reference's bit for bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnres_serve.kernels import reference
from benchmarks.kernels.cells import GATE_TOKENS, KEY_EPS, NORM_EPS, Inputs
from benchmarks.kernels.contenders import Contender, Run

# A float32 rounding is 2^-24; so many of them may add up in sums, roots and exponentials.
FLOAT32_ROUNDINGS = 8


class Expected(NamedTuple):
    """Exact result of a site, ``[T, d]`` in float64, and the bounds of a difference from it.

    Attributes:
        result: the exact normed mix.
        partial_sum: exactly as it is stored.
        arithmetic: ``[T, d]`` error of a computation in float32.
        rounding: ``[T, d]`` error of one rounding to the activation dtype on the way.
    """

    result: Tensor
    partial_sum: Tensor
    arithmetic: Tensor
    rounding: Tensor


def expected_sites(inputs: Inputs, algorithm: str) -> Iterator[Expected]:
    """The sites of a cell, one after the other, of depth attention or of a standard residual."""
    blocks = list(inputs.blocks)
    partial_sum: Tensor | None = blocks.pop()
    for index in range(inputs.cell.sites):
        delta, query = inputs.deltas[index], inputs.queries[index]
        if algorithm == "residual":
            partial_sum = reference.add_partial(partial_sum, delta)
            yield expected_site([partial_sum], query, inputs.norm_weight)
            continue
        if index == 1:
            blocks.append(partial_sum)
            partial_sum = None
        partial_sum = reference.add_partial(partial_sum, delta)
        yield expected_site([*blocks, partial_sum], query, inputs.norm_weight)


def expected_site(sources: list[Tensor], query: Tensor, weight: Tensor) -> Expected:
    """A site on sources ``[T, d]``, the partial sum last; with one source, a plain RMSNorm."""
    parts = [
        _chunk([source[first : first + GATE_TOKENS] for source in sources], query, weight)
        for first in range(0, sources[0].shape[0], GATE_TOKENS)
    ]
    result, arithmetic, rounding = map(torch.cat, zip(*parts, strict=True))
    return Expected(result, sources[-1], arithmetic, rounding)


def _chunk(sources: list[Tensor], query: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
    result = reference.rms_norm(mixed, weight, NORM_EPS)
    largest = torch.stack(sources).abs().amax(0).double()
    gain = weight.double().abs() * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + NORM_EPS)

    # A score's error grows with its size and with the root of the summed squares of its terms; a
    # weight inherits it relatively.
    condition = largest.new_zeros(largest.shape[:1])
    for source in sources:
        wide = source.double()
        scale = torch.rsqrt(wide.square().mean(-1) + KEY_EPS)
        terms = (wide * query.double()).square().sum(-1).sqrt() * scale
        score = reference.scores(wide, query.double(), KEY_EPS).abs()
        condition = torch.maximum(condition, 1 + terms + score)
    # The norm spreads an error of its sum of squares over the row.
    arithmetic = (gain * largest + result.abs()) * condition[:, None]
    arithmetic *= FLOAT32_ROUNDINGS * 2**-24
    rounding = (gain * largest + result.abs()) * (torch.finfo(sources[0].dtype).eps / 2)
    return result, arithmetic, rounding


def excess(actual: Tensor, expected: Expected, roundings: int) -> float:
    """The largest error of a result in units of what it may be; NaN counts as infinite."""
    if actual.shape != expected.result.shape:
        return float("inf")
    limits = torch.finfo(actual.dtype)
    half_ulp = expected.result.abs().clamp(min=limits.smallest_normal) * (limits.eps / 2)
    allowed = half_ulp + expected.arithmetic + roundings * expected.rounding
    error = (actual.double() - expected.result).abs() / allowed
    return float(torch.nan_to_num(error, nan=torch.inf).max())


def examine(
    inputs: Inputs, runs: dict[str, Run], contenders: dict[str, Contender]
) -> tuple[dict[str, float], dict[str, str]]:
    """Call every site of every contender once and compare it with the reference.

    Args:
        inputs: of the cell.
        runs: what to call, by name.
        contenders: what they are, by name.

    Returns:
        Of those that pass, the largest error in units of what it may be; of the others, what is
        wrong, in a sentence.
    """
    errors, failures = dict.fromkeys(runs, 0.0), {}
    for run in runs.values():
        run.reset()
        for tensor in run.poison:
            tensor.fill_(torch.nan)
    for algorithms in (("single_pass", "two_phase"), ("residual",)):
        names = [name for name in runs if contenders[name].algorithm in algorithms]
        if not names:
            continue
        for index, expected in enumerate(expected_sites(inputs, algorithms[0])):
            for name in names:
                if name in failures:
                    continue
                try:
                    actual = runs[name].sites[index]()
                    partial_sum = runs[name].partial_sum()
                except Exception as error:  # another project's code may raise anything
                    failures[name] = f"site {index} raised {first_line(error)}"
                    continue
                off = excess(actual, expected, contenders[name].roundings)
                errors[name] = max(errors[name], off)
                if off > 1:
                    failures[name] = f"site {index} is off by {off:.3g} times what it may be"
                elif not torch.equal(partial_sum, expected.partial_sum):
                    failures[name] = f"the partial sum after site {index} is not the reference's"
    for run in runs.values():
        run.reset()
    return {name: error for name, error in errors.items() if name not in failures}, failures


def first_line(error: BaseException) -> str:
    """Type and first line of what an exception says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
