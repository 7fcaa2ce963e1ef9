"""Cells of equal requests, with prompts that no engine has seen before."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres_serve.errors import SettingError

PROMPT_LENGTHS = (128, 512)
BATCHES = (1, 8)
CONTEXTS = (128,)
STEPS = 48
STARTS = 4  # an even number: every engine is started before another as often as behind it
ROUNDS = 4  # of each start
ROUNDS_OF_ONE = 8  # of a single start, whose interval is over them
PERCENTILES = (50, 90, 99)  # of TTFT and ITL
PREFILLS = 5  # in one round: each is short, and their median is steadier than one of them
SLICE = 6  # timed steps of decode that an engine takes before the next one is asked
UNTIMED = 2  # steps at the beginning of a slice: the other engine has had the caches
WARM_TOKENS, WARM_STEPS = 16, 4  # the request before a prefill: the other engine has had the caches


@dataclass(frozen=True)
class Cell:
    """One kind of work.

    Attributes:
        phase: prefill, one prompt and its first token, or decode, one token of each sequence after
            the other.
        batch: sequences that run together.
        context: tokens of each prompt.
        steps: timed steps; 0 in prefill.
    """

    phase: str
    batch: int
    context: int
    steps: int

    @property
    def turns(self) -> int:
        """Number of times that every engine is asked in one round."""
        return PREFILLS if self.phase == "prefill" else 1

    @property
    def slices(self) -> list[int]:
        """The timed steps of each slice of a round, none in prefill."""
        number = -(-self.steps // SLICE)
        ends = [self.steps * count // number for count in range(1, number + 1)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def max_tokens(self) -> int:
        return 1 + sum(UNTIMED + steps for steps in self.slices)

    @property
    def label(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.context} tokens"
        return f"decode, batch {self.batch}, context {self.context}"


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
    contexts: Sequence[int] | None,
    steps: int,
) -> list[Cell]:
    """The cells of a run.

    Args:
        longest: tokens that prompt and answer may have together.
        prompt_lengths: of prefill; None for those usual ones that fit.
        batches, contexts: of decode; None for the usual contexts, shortened if need be.
        steps: timed steps of a decode cell.

    Raises:
        SettingError: a number is out of its range.
    """
    room = longest - Cell("decode", 1, 0, steps).max_tokens
    if room < 1 or longest < WARM_TOKENS + WARM_STEPS:
        raise SettingError(
            f"--steps is {steps}, but prompt and answer have room for {longest} tokens together; "
            f"ask for fewer steps, of a model with room for {WARM_TOKENS + WARM_STEPS} at least."
        )
    lengths = prompt_lengths or [min(length, longest - 1) for length in PROMPT_LENGTHS]
    shorter = contexts or [min(context, room) for context in CONTEXTS]
    for flag, values, most in (
        ("--prompt-lengths", lengths, longest - 1),
        ("--contexts", shorter, room),
        ("--batches", batches, 4096),
    ):
        for value in values:
            if not 1 <= value <= most:
                raise SettingError(f"{flag} has {value}; expected 1 to {most} here.")
    found = [Cell("prefill", 1, length, 0) for length in dict.fromkeys(lengths)]
    found += [
        Cell("decode", batch, context, steps)
        for context in dict.fromkeys(shorter)
        for batch in dict.fromkeys(batches)
    ]
    return found


def room(cells: Sequence[Cell]) -> int:
    """Tokens that prompt and answer have together in the longest request, warm-ups included."""
    return max(WARM_TOKENS + WARM_STEPS, *(cell.context + cell.max_tokens for cell in cells))


def draw_prompts(cell: Cell, vocabulary: int, number: int) -> list[list[int]]:
    """The prompts of a cell's turn ``number``: new in every turn, equal for all engines."""
    draw = random.Random(f"{cell} {number}")
    return [draw.choices(range(vocabulary), k=cell.context) for _ in range(cell.batch)]
