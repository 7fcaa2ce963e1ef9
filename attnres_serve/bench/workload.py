"""Cells of equal requests, with prompts that no engine has seen before."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres_serve.errors import SettingError

PHASES = ("prefill", "decode")
PROMPT_LENGTHS = (128, 512)
BATCHES = (1, 8)
STARTS = 4  # an even number: every engine is started before another as often as behind it
ROUNDS = 4  # of each start
ROUNDS_OF_ONE = 8  # of a single start
QUICK_ROUNDS = 1  # of a trial, which starts for longer than it measures
PERCENTILES = (50, 90, 99)
PREFILLS = 5  # in one round: each is short, and their median is steadier than one of them
SLICE = 6  # timed steps of decode that an engine takes before the next one is asked
STEPS, QUICK_STEPS = 8 * SLICE, 3 * SLICE
UNTIMED = 2  # steps at the beginning of a slice: the other engine has had the caches


@dataclass(frozen=True)
class Cell:
    """One kind of work.

    Attributes:
        phase: prefill, one prompt and its first token, or decode, one token of each sequence after
            the other.
        batch: sequences that run together.
        context: tokens of each prompt.
        steps: timed steps, whole slices of them; 0 in prefill.
    """

    phase: str
    batch: int
    context: int
    steps: int

    @property
    def turns(self) -> int:
        """Number of times that every engine is given prompts in one round."""
        return PREFILLS if self.phase == "prefill" else 1

    @property
    def slices(self) -> list[int]:
        """The timed steps of each slice of a round, none in prefill."""
        return [SLICE] * (self.steps // SLICE)

    def max_tokens(self, drafts: int = 0) -> int:
        """The most tokens of an answer, where each step adds up to so many drafted ones."""
        return 1 + (1 + drafts) * len(self.slices) * (UNTIMED + SLICE)

    @property
    def label(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.context} tokens"
        return f"decode, batch {self.batch}, context {self.context}"


# The request before others, because the other engine has had the caches: prompt and answer.
WARM, WARM_TOKENS = Cell("decode", 1, 16, 0), 4


def rounds_of(starts: int) -> int:
    """The usual rounds of each of so many starts."""
    return ROUNDS if starts > 1 else ROUNDS_OF_ONE


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell that a row of a document is of."""
    return Cell(row["phase"], row["batch"], row["context"], row["steps"])


def make_cells(
    longest: int,
    prompt_lengths: Sequence[int] | None,
    batches: Sequence[int],
    steps: int,
    drafts: int = 0,
) -> list[Cell]:
    """The cells of a run: prefill of every length, and decode of every batch behind the first.

    Args:
        longest: tokens that prompt and answer may have together.
        prompt_lengths: None for the usual ones, shortened if need be.
        batches: sequences that decode together.
        steps: timed steps of a decode cell.
        drafts: tokens that are drafted for a step.

    Raises:
        SettingError: a number is out of its range.
    """
    most = longest - Cell("decode", 1, 0, steps).max_tokens(drafts)
    if most < WARM.context:
        raise SettingError(
            f"prompt and answer have room for {longest} tokens together; expected at least "
            f"{longest - most + WARM.context}: a greater --max-model-len, or another model."
        )
    lengths = prompt_lengths or [min(length, most) for length in PROMPT_LENGTHS]
    for flag, values, limit in (("--prompt-lengths", lengths, most), ("--batches", batches, 4096)):
        for value in values:
            if not 1 <= value <= limit:
                raise SettingError(f"{flag} has {value}; expected 1 to {limit} here.")
    cells = [Cell("prefill", 1, length, 0) for length in lengths]
    cells += [Cell("decode", batch, lengths[0], steps) for batch in batches]
    return list(dict.fromkeys(cells))


def draw_prompts(vocabulary: int, cell: Cell, number: int) -> list[list[int]]:
    """The prompts of a cell's turn ``number``: new in every turn, equal for all engines."""
    draw = random.Random(f"{cell} {number}")
    return [draw.choices(range(vocabulary), k=cell.context) for _ in range(cell.batch)]
