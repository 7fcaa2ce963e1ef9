"""Paths of figures.  Matplotlib is not part of every installation."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from attnres_serve.errors import SettingError

FIGURES = (".png", ".svg", ".pdf")


def out_path(name: str, suffixes: Iterable[str], width: float | None, flag: str = "--out") -> Path:
    """The path that ``--out``, or another flag, names.

    Args:
        name: the value of the flag.
        suffixes: the supported suffixes.
        width: the value of ``--width``, in inches.
        flag: the flag.

    Raises:
        SettingError: no such file can be written there, or it cannot have this width.
    """
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        raise SettingError(
            f"{flag} is {path}; expected a name that ends with one of {', '.join(suffixes)}."
        )
    if not path.parent.is_dir():
        raise SettingError(f"{flag}: {path.parent} is not a folder; make it first.")
    if width is not None and not (suffix in FIGURES and 2 <= width <= 40):
        raise SettingError(f"--width is {width:g}; expected 2 to 40 inches, for a figure.")
    if suffix in FIGURES and find_spec("matplotlib") is None:
        raise SettingError(
            f"{flag} {path.name} needs matplotlib, which is not installed; install it, or "
            "attnres-serve with the extra plot."
        )
    return path
