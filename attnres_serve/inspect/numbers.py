"""The files that ``--out`` and ``--numbers`` name: a figure, and its numbers as CSV or npz."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.inspect.pictures import require_matplotlib

NUMBERS = (".csv", ".npz")
FIGURES = (".png", ".svg", ".pdf")
DEFAULT = "inspect.png"  # where neither is named


class Outputs(NamedTuple):
    """The files to write; one of them may be None."""

    numbers: Path | None
    figure: Path | None


def outputs(numbers: str | None, out: str | None) -> Outputs:
    """The files that ``--numbers`` and ``--out`` name.

    Nothing is drawn where only numbers are named.

    Raises:
        SettingError: no such file can be written there.
    """
    table = None if numbers is None else _path("--numbers", numbers, NUMBERS)
    if out is None and table is not None:
        return Outputs(table, None)
    drawn = _path("--out", out or DEFAULT, FIGURES)
    require_matplotlib(f"--out {drawn.name}")
    return Outputs(table, drawn)


def _path(flag: str, name: str, suffixes: tuple[str, ...]) -> Path:
    path = Path(name)
    if path.suffix.lower() not in suffixes:
        raise SettingError(
            f"{flag} is {path}; expected a name that ends with {' or '.join(suffixes)}."
        )
    if not path.parent.is_dir():
        raise SettingError(f"{flag}: {path.parent} is not a folder; make it first.")
    return path


def write(
    paths: Outputs,
    draw: Callable[[Path], None],
    table: Mapping[str, Sequence[Any]],
    arrays: Mapping[str, Any],
) -> None:
    """Write the files and print their names.

    Args:
        paths: the files.
        draw: writes the figure.
        table: columns of one length by their names, for CSV.  None and NaN are left empty, and
            numbers have nine significant digits, which tell any two float32 numbers apart.
        arrays: for npz.  There NaN stands for what does not exist.

    Raises:
        SettingError: one cannot be written.
    """

    def write_one(path: Path) -> None:
        if path == paths.figure:
            draw(path)
        elif path.suffix.lower() == ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                lines = csv.writer(file, lineterminator="\n")
                lines.writerow(table)
                lines.writerows(map(_fields, zip(*table.values(), strict=True)))
        else:
            with path.open("wb") as file:  # of a path, numpy would change its suffix .NPZ
                np.savez_compressed(file, **arrays)

    for path in paths:
        if path is not None:
            try:
                write_one(path)
            except OSError as error:
                raise SettingError(f"{path} cannot be written ({error}).") from None
            print(path, file=output.out())


def _fields(row: Sequence[Any]) -> list[Any]:
    return [_field(value) for value in row]


def _field(value: Any) -> Any:
    if isinstance(value, float):  # numpy's float64 is one
        return "" if math.isnan(value) else f"{value:.9g}"
    return value
