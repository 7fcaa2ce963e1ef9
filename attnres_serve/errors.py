"""What a user meets: one sentence that says what was found, what is expected and how to mend it."""


class CheckpointError(ValueError):
    """The checkpoint is not one that can be served as its config.json describes."""


class SettingError(ValueError):
    """A setting asks for something that does not exist or would give wrong numbers."""


def first_line(error: BaseException) -> str:
    """What a foreign exception is and the first line of what it says, for such a sentence."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
