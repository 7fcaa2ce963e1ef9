"""``attnres-serve inspect --queries``: what the sites of a checkpoint have learned."""

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.lens.pictures import FIGURES, out_path
from attnres_serve.tracing import queries as learned

TABLE = ".csv"


def queries(checkpoint: str | None, out: str, width: float | None, flags: list[str]) -> int:
    """Draw what the sites of a checkpoint have learned, or write it as a table.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        out: ``--out``.
        width: ``--width``.
        flags: of a server, of which there must be none.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--queries reads a checkpoint; give it right after `inspect`.")
    if flags:
        raise SettingError(f"{flags[0]} is for a server; --queries starts none.")
    path = out_path(out, (*FIGURES, TABLE), width)
    found = learned.read(checkpoint)
    try:
        if path.suffix.lower() == TABLE:
            _write_table(found, path)
        else:
            _draw(checkpoint, found, path, width)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None
    print(path, file=output.out())
    return 0


def _write_table(found: learned.Queries, path: Path) -> None:
    table = learned.table(found)
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(table)
        lines.writerows(map(_fields, zip(*table.values(), strict=True)))


def _fields(row: tuple[Any, ...]) -> list[Any]:
    """The row with nine digits, which tell any two float32 numbers apart, and nothing for NaN."""
    return [
        ("" if math.isnan(value) else f"{value:.9g}") if isinstance(value, float) else value
        for value in row
    ]


def _draw(checkpoint: str, found: learned.Queries, path: Path, width: float | None) -> None:
    from attnres_serve.lens import figure

    sizes = {
        "length of the\neffective query": found.effective,
        "rms of the\nkey norm": found.key_norm,
    }
    if found.bias is not None:
        sizes["recency\nbias"] = found.bias
    title = f"{Path(checkpoint).name or checkpoint}: what the sites have learned"
    drawn = partial(figure.queries, title, found.rows, found.cosine, sizes)
    figure.write(path, drawn, width or figure.WIDTH)
