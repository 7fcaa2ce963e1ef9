"""Prompts that a model can continue: parts of the text of Python's standard library.

The number of accepted drafts depends on the text, and random tokens are no text.
"""

import random
import sysconfig
from pathlib import Path

from attnres_serve.bench.workload import Case
from attnres_serve.checkpoints import tokenizer

MOST = 2**20  # characters; tokenizing them takes about a second


class Text:
    """A text as token ids of a checkpoint.

    Args:
        folder: the checkpoint, for its tokenizer.

    Raises:
        CheckpointError: it has no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:MOST]
        encode = tokenizer.load(folder)
        self.opening = encode("").input_ids
        self.tokens = encode(text, add_special_tokens=False, verbose=False).input_ids

    def draw(self, case: Case, number: int) -> list[list[int]]:
        """The prompts of a case's turn ``number``, which are equal for all engines."""
        chosen = random.Random(f"{number} {case}")
        length = case.context - len(self.opening)
        begins = (chosen.randrange(len(self.tokens) - length) for _ in range(case.batch))
        return [self.opening + self.tokens[begin : begin + length] for begin in begins]
