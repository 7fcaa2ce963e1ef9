"""Contenders that are ours with another config than the tables hold, each named after its own.

``python -m benchmarks.kernels --configs`` measures them beside the tables' own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from attnres_serve.kernels.triton import (
    answers,
    common,
    mix_group,
    phase_1,
    score_group,
    single_pass,
)
from attnres_serve.kernels.triton.answers import GroupConfig
from attnres_serve.kernels.triton.common import MAX_HIDDEN, Config
from attnres_serve.kernels.triton.mix_group import PartConfig
from attnres_serve.kernels.triton.phase_1 import Least
from attnres_serve.kernels.triton.score_group import MAX_SITES, ProductConfig
from benchmarks.kernels import contenders
from benchmarks.kernels.cells import Cell, Inputs
from benchmarks.kernels.contenders import Contender, Run


class Other(NamedTuple):
    """A name of a module, and what it stands for instead."""

    module: ModuleType
    name: str
    value: Any


# Largest padded hidden size -> configs (tile, warps) of a site and (sites, warps) of phase 1.
SITES = {
    1024: [(1, 1), (2, 2), (2, 4), (4, 4)],
    2048: [(1, 2), (2, 4), (2, 8), (4, 4), (4, 8)],
    4096: [(1, 4), (2, 8), (4, 8), (2, 16)],
    8192: [(1, 8), (2, 8), (1, 16), (2, 16)],
}
GROUPS = {
    1024: [(2, 1), (2, 2), (4, 2), (4, 4)],
    2048: [(1, 1), (1, 2), (2, 2), (4, 4), (2, 4)],
    4096: [(1, 2), (1, 4), (2, 4), (2, 8)],
    8192: [(1, 4), (2, 8), (1, 8)],
}
PRODUCTS = [
    *[(16, 128, 1), (16, 256, 2), (32, 64, 2), (32, 128, 2), (32, 128, 4), (32, 256, 4)],
    *[(64, 32, 2), (64, 64, 4)],
]
PARTS = [(8, 256, 1), (8, 512, 2), (4, 1024, 4), (8, 1024, 4), (16, 512, 4)]
NEVER = Other(phase_1, "LEAST", {MAX_HIDDEN: Least(logits=2**62, sites=1)})
ALWAYS = Other(phase_1, "LEAST", {MAX_HIDDEN: Least(logits=1, sites=2)})


def candidates() -> dict[str, Contender]:
    """All of them, by name."""
    found: dict[str, Contender] = {}
    for limit, shapes in SITES.items():
        for shape in shapes:
            tables = (
                (common, "CONFIGS"),
                (single_pass, "FEW_CONFIGS"),
                (single_pass, "PHASE_2_CONFIGS"),
            )
            others = [Other(*table, {MAX_HIDDEN: Config(*shape)}) for table in tables]
            name = "x".join(map(str, shape))
            for algorithm in ("single_pass", "two_phase"):
                _add(found, f"{algorithm}/site{name}", algorithm, others, _near(limit))
    for limit, shapes in GROUPS.items():
        for shape in shapes:
            other = Other(answers, "GROUP_CONFIGS", {MAX_HIDDEN: GroupConfig(*shape)})
            name = f"two_phase/group{shape[0]}x{shape[1]}"
            _add(found, name, "two_phase", [NEVER, other], _near(limit))
    for product in PRODUCTS:
        table = {MAX_SITES: ProductConfig(*product)}
        others = [Other(score_group, name, table) for name in ("CONFIGS", "OTHER_CONFIGS")]
        name = "x".join(map(str, product))
        _add(found, f"two_phase/product{name}", "two_phase", [ALWAYS, *others], _many)
    for part in PARTS:
        other = Other(mix_group, "CONFIGS", {MAX_HIDDEN: PartConfig(*part)})
        name = "x".join(map(str, part))
        _add(found, f"two_phase/part{name}", "two_phase", [ALWAYS, other], _many)
    _add(found, "two_phase/product", "two_phase", [ALWAYS], _many)
    for name, most in (("side_by_side", 2**62), ("one_by_one", 0)):
        others = [NEVER, Other(phase_1, "SIDE_BY_SIDE", {MAX_HIDDEN: most})]
        _add(found, f"two_phase/{name}", "two_phase", others, lambda cell: True)
    return found


def _near(limit: int) -> Callable[[Cell], bool]:
    return lambda cell: limit // 2 < cell.hidden <= limit


def _many(cell: Cell) -> bool:
    return cell.tokens >= 1024


def _add(
    found: dict[str, Contender],
    name: str,
    algorithm: str,
    others: list[Other],
    suits: Callable[[Cell], bool],
) -> None:
    """A contender; one of that name that is there runs where this one does too."""
    plain, same = contenders.CONTENDERS[algorithm], found.get(name)
    found[name] = Contender(
        lambda inputs: _start(plain.start, others, inputs),
        algorithm,
        plain.roundings,
        plain.fused,
        "cells that it may suit",
        lambda cell: suits(cell) or (same is not None and same.runs_at(cell)),
        ours=True,
    )


def _start(start: Callable[[Inputs], Run], others: list[Other], inputs: Inputs) -> Run:
    """A run whose sites are called, and so captured, with the others in place."""
    run = start(inputs)

    def site(call: Callable[[], Tensor]) -> Tensor:
        with _replaced(others):
            return call()

    run.sites = [lambda call=call: site(call) for call in run.sites]  # type: ignore[misc]
    return run


@contextmanager
def _replaced(others: list[Other]) -> Iterator[None]:
    before = [getattr(other.module, other.name) for other in others]
    for other in others:
        setattr(other.module, other.name, other.value)
    try:
        yield
    finally:
        for other, value in zip(others, before, strict=True):
            setattr(other.module, other.name, value)
