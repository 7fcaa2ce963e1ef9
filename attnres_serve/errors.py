"""Errors for users: one sentence with the actual value, the expected one and the fix."""


class CheckpointError(ValueError):
    """The checkpoint cannot be served as its config.json describes."""


class SettingError(ValueError):
    """A setting has an unknown value, or one that would give wrong numbers."""


def first_line(error: BaseException) -> str:
    """The type of a foreign exception and the first line of its message, for such a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
