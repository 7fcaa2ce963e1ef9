"""What clients are told of a dead engine; vLLM's sentence is about a stack trace above."""

from typing import Any

SENTENCE = "The engine is dead; ask another server, or ask again later."


def answer_in_a_sentence() -> None:
    """Say it in every answer that there is not, and in the log (idempotent)."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Any = EngineDeadError
    error.__str__ = lambda self: SENTENCE
