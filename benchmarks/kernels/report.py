"""Rows of the document, made of the times."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import torch

from attnres_serve.bench.ratios import paired_ratios
from benchmarks.kernels.cells import Cell
from benchmarks.kernels.contenders import BASELINE, Contender, algorithm_bytes

AGAINST = (BASELINE, "single_pass")


def summarise(
    cell: Cell,
    samples: dict[str, list[list[float]]],
    contenders: dict[str, Contender],
    errors: dict[str, float],
    dtype: torch.dtype,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """The rows of a cell.

    Args:
        cell: the shape.
        samples: microseconds of every site, by contender and round.
        contenders: what they are, by name.
        errors: of the gate, by contender.
        dtype: of the activations.
        bandwidth: bytes a second of a copy.

    Returns:
        Per contender the microseconds of the block and of a site (the block's by the number of
        sites; the first; the later ones but the second, which begins the partial sum), the bytes
        of its algorithm, the microseconds in which a copy moves as many, and the medians of the
        ratios within a round.
    """
    blocks = {name: [sum(times) for times in rounds] for name, rounds in samples.items()}
    rows = []
    for name, rounds in samples.items():
        moved = algorithm_bytes(contenders[name].algorithm, cell, dtype)
        floor = 1e6 * moved / bandwidth
        spread = quartiles(blocks[name])
        row = {**cell._asdict(), "contender": name, "rounds": len(rounds)}
        row |= {"block_us": spread, "site_us": spread["median"] / cell.sites}
        row |= {"first_us": median(times[0] for times in rounds)}
        later = [median(times[2:]) for times in rounds if len(times) > 2]
        row |= {"later_us": median(later) if later else None}
        row |= {"bytes": moved, "floor_us": floor, "floor_share": floor / spread["median"]}
        row["ratios"] = {
            other: median(paired_ratios(blocks[name], blocks[other]))
            for other in AGAINST
            if other in samples and other != name
        }
        rows.append(row | {"gate": errors[name], "block_us_rounds": blocks[name]})
    return rows


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; of one value, that value."""
    low, middle, high = (
        quantiles(values, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    )
    return {"median": middle, "q1": low, "q3": high}
