"""What a user meets: one sentence that says what was found, what is expected and how to mend it."""


class CheckpointError(ValueError):
    """The checkpoint is not one that can be served exactly as it was trained."""


class SettingError(ValueError):
    """A setting asks for something that does not exist or would give wrong numbers."""
