"""The cache folder of this user."""

import os
from pathlib import Path


def made(inside: str = "") -> Path:
    """Make ``~/.cache/attnres_serve`` (``$XDG_CACHE_HOME/attnres_serve``), or a folder in it.

    Raises:
        OSError: it does not exist and cannot be made.
    """
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = stated if stated.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None
    folder = root / "attnres_serve" / inside
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
