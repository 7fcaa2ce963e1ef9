"""Requests that an engine cannot take, refused before they are queued."""

import re
from collections.abc import Callable
from typing import Any

from attnres_serve.compat.patch import Patch


def refuse_by(client, problem: Callable[[Any], str | None]) -> None:
    """Refuse requests for which ``problem`` returns a sentence.

    The check runs when a request gets its id: it is complete, but not queued.
    """

    def make(assign: Callable) -> Callable:
        def assign_if_there_is_none(request) -> None:
            sentence = problem(request)
            if sentence:
                raise refusal(sentence)
            assign(request)

        return assign_if_there_is_none

    PATCH.apply_to(client.input_processor, make)


def refusal(sentence: str) -> Exception:
    """An error with status 400 for clients; its ``param`` is the first field in backticks."""
    from vllm.exceptions import VLLMValidationError

    field = re.search(r"`([\w.]+)`", sentence)
    return VLLMValidationError(sentence, parameter=field and field[1])


PATCH = Patch(
    targets=("assign_request_id",),
    of="one engine's input processor",
    why="some requests ended the engine (`worker_limits.py`, `ids_without_row.py`), were answered "
    "with 500 (`unsendable.py`) or by an arbitrary token (`no_token_left.py`, `penalties.py`)",
    models="every model of our server",
    first=(0, 28),
    report="requests-that-end-the-engine",
)
