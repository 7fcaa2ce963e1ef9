"""Cases of equal requests, with new prompts in every turn."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnres_serve.errors import SettingError

PHASES = ("prefill", "decode")
PROMPT_LENGTHS = (128, 512)
BATCHES = (1, 8)
STARTS = 4  # an even number: every engine starts equally often before and after another
ROUNDS = 4  # of each start
ROUNDS_OF_ONE = 8  # of a single start
QUICK_ROUNDS = 1  # of a quick run, whose start takes longer than its measurement
PERCENTILES = (50, 90, 99)
PREFILLS = 5  # in one round: each is short, and their median is steadier than a single one
SLICE = 6  # timed steps of decode of an engine before the next engine's turn
STEPS, QUICK_STEPS = 8 * SLICE, 3 * SLICE
UNTIMED = 2  # steps at the beginning of a slice: the other engine has evicted the caches


@dataclass(frozen=True)
class Case:
    """One kind of work.

    Attributes:
        phase: ``prefill``, a prompt and its first token, or ``decode``, the tokens after it.
        batch: number of sequences that run together.
        context: tokens of each prompt.
        steps: timed steps, a multiple of ``SLICE``; 0 in prefill.
    """

    phase: str
    batch: int
    context: int
    steps: int

    @property
    def turns(self) -> int:
        """The number of times that every engine gets prompts in one round."""
        return PREFILLS if self.phase == "prefill" else 1

    @property
    def slices(self) -> list[int]:
        """The timed steps of each slice of a round; empty in prefill."""
        return [SLICE] * (self.steps // SLICE)

    @property
    def shortest(self) -> "Case":
        """The same case with one slice."""
        return replace(self, steps=min(self.steps, SLICE))

    def max_tokens(self, drafts: int = 0) -> int:
        """The maximum number of generated tokens, if each step adds up to so many drafted ones."""
        return 1 + (1 + drafts) * len(self.slices) * (UNTIMED + SLICE)

    @property
    def label(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.context} tokens"
        return f"decode, batch {self.batch}, context {self.context}"


# A first request, because the other engine has evicted the caches, and its number of new tokens.
WARM, WARM_TOKENS = Case("decode", 1, 16, 0), 4


def rounds_of(starts: int) -> int:
    """The default number of rounds of each of so many starts."""
    return ROUNDS if starts > 1 else ROUNDS_OF_ONE


def case_of(row: Mapping[str, Any]) -> Case:
    """The case of a row of a document."""
    return Case(row["phase"], row["batch"], row["context"], row["steps"])


def make_cases(
    longest: int,
    prompt_lengths: Sequence[int] | None,
    batches: Sequence[int],
    steps: int,
    drafts: int = 0,
) -> list[Case]:
    """The cases of a run: prefill of every length, and decode of every batch at the first length.

    Args:
        longest: maximum tokens of prompt and generated text together.
        prompt_lengths: None for the default lengths, shortened if necessary.
        batches: numbers of sequences that decode together.
        steps: timed steps of a decode case.
        drafts: number of tokens drafted for a step.

    Raises:
        SettingError: a number is out of its range.
    """
    most = longest - Case("decode", 1, 0, steps).max_tokens(drafts)
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
    cases = [Case("prefill", 1, length, 0) for length in lengths]
    cases += [Case("decode", batch, lengths[0], steps) for batch in batches]
    return list(dict.fromkeys(cases))


def draw_prompts(vocabulary: int, case: Case, number: int) -> list[list[int]]:
    """The prompts of a case's turn ``number``: new in every turn, equal for all engines."""
    draw = random.Random(f"{case} {number}")
    return [draw.choices(range(vocabulary), k=case.context) for _ in range(case.batch)]
