"""Pictures need matplotlib, which is not part of every installation."""

from importlib.util import find_spec

from attnres_serve.errors import SettingError


def require_matplotlib(flag: str) -> None:
    """Raise SettingError if it is not installed; ``flag`` is what asks for it."""
    if find_spec("matplotlib") is None:
        raise SettingError(
            f"{flag} needs matplotlib, which is not installed; install it, or attnres-serve with "
            "the extra plot."
        )
