"""Prompts that a model can continue: parts of the text of Python's standard library.

How many drafts are accepted is a matter of the text, and random tokens are none.
"""

import random
import sysconfig
from pathlib import Path

from attnres_serve.bench.workload import Cell
from attnres_serve.checkpoints import tokenizer

MOST = 2**20  # characters, which take about a second


class Text:
    """A text in tokens of a checkpoint's.

    Args:
        folder: of the checkpoint, read for its tokenizer.

    Raises:
        CheckpointError: it has none.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:MOST]
        encode = tokenizer.load(folder)
        self.opening = encode("").input_ids
        self.tokens = encode(text, add_special_tokens=False, verbose=False).input_ids

    def draw(self, cell: Cell, number: int) -> list[list[int]]:
        """The prompts of a cell's turn ``number``, which are equal for all engines."""
        chosen = random.Random(f"{number} {cell}")
        length = cell.context - len(self.opening)
        begins = (chosen.randrange(len(self.tokens) - length) for _ in range(cell.batch))
        return [self.opening + self.tokens[begin : begin + length] for begin in begins]
