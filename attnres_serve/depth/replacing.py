"""The vectors by which an edit replaces a source."""

import base64

import numpy as np

from attnres_serve.errors import SettingError

LARGEST = 1e15  # the sum of squares of a vector of such numbers is finite in float32


def vectors(text: str, name: str, tokens: int, hidden: int | None) -> bytes:
    """The bytes of ``[1, hidden]`` or ``[tokens, hidden]`` float32, of which ``text`` is base64.

    Raises:
        SettingError: it is not, or some are not finite, or nothing can be replaced (no ``hidden``).
    """
    if hidden is None:
        raise SettingError(f"{name} is for traces: its vectors are of the tokens of one sequence.")
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except ValueError:
        raise SettingError(f"{name} cannot be read; expected base64 of float32 numbers.") from None
    if numbers.size not in (hidden, tokens * hidden):
        raise SettingError(
            f"{name} has {numbers.size} numbers; expected the {hidden} of one vector, or "
            f"{tokens} x {hidden}, one for each of its tokens."
        )
    if not (np.abs(numbers) <= LARGEST).all():
        raise SettingError(
            f"{name} has a number that is not finite or is beyond {LARGEST:.0e}; expected vectors "
            "like the model's own."
        )
    return numbers.tobytes()
