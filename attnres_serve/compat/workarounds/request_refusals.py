"""Requests that an engine cannot take, refused before they are queued."""

from collections.abc import Callable
from typing import Any


def refuse_by(client, problem: Callable[[Any], str | None]) -> None:
    """Have an engine refuse requests about which ``problem`` has a sentence.

    They are asked when given their id: whole, and not yet queued.
    """
    from vllm.exceptions import VLLMValidationError

    processor = client.input_processor
    assign: Callable = processor.assign_request_id

    def assign_if_there_is_none(request) -> None:
        found = problem(request)
        if found:
            raise VLLMValidationError(found)
        assign(request)

    processor.assign_request_id = assign_if_there_is_none
