"""What ``attnres-serve inspect`` shows beside traces: learned queries and whole texts."""

import argparse
from pathlib import Path

from attnres_serve.checkpoints import hub
from attnres_serve.errors import SettingError
from attnres_serve.inspect import numbers, prepare
from attnres_serve.inspect import queries as learned
from attnres_serve.inspect.pieces import parts_of_file


def queries(checkpoint: str | None, table: str | None, out: str | None, flags: list[str]) -> int:
    """Draw what the sites of a checkpoint have learned, and write it as numbers.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        table: ``--numbers``.
        out: ``--out``.
        flags: of an engine, of which there must be none.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--queries reads a checkpoint; give it right after `inspect`.")
    if flags:
        raise SettingError(f"{flags[0]} is for an engine; --queries starts none.")
    paths = numbers.outputs(table, out)
    found = learned.read(checkpoint, hub.on_this_machine(checkpoint))

    def draw(path: Path) -> None:
        from attnres_serve.inspect import queries_figure

        queries_figure.write(checkpoint, found, path)

    numbers.write(paths, draw, learned.table(found), learned.arrays(found))
    return 0


def whole_text(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Draw the depth weights over a text, and write them as numbers.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        own: the flags of ours.
        flags: of vLLM's engine.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--text starts an engine; give a checkpoint right after `inspect`.")
    paths = numbers.outputs(own.numbers, own.out)
    from attnres_serve.inspect import statistics, text

    model = prepare.opened(checkpoint, own.max_model_len, flags)
    pieces = text.pieces_of(model, parts_of_file("--text", own.text))
    (found,) = text.summaries(prepare.name_of(checkpoint, flags), model, [pieces], flags)

    def draw(path: Path) -> None:
        from attnres_serve.inspect import text_figure

        text_figure.write(found, path)

    numbers.write(paths, draw, statistics.table(found), statistics.arrays(found))
    return 0
