"""The folder that keeps what is made once for this machine and its user."""

import os
from pathlib import Path


def made(inside: str = "") -> Path:
    """``~/.cache/attnres_serve`` (``$XDG_CACHE_HOME/attnres_serve``), or one in it, which is made.

    Raises:
        OSError: there is no such folder and none can be made.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None
    folder = root / "attnres_serve" / inside
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
