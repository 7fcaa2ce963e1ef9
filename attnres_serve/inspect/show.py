"""``attnres-serve inspect --queries``: what the sites of a checkpoint have learned."""

from pathlib import Path

from attnres_serve.checkpoints import hub
from attnres_serve.errors import SettingError
from attnres_serve.inspect import numbers
from attnres_serve.inspect import queries as learned


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
