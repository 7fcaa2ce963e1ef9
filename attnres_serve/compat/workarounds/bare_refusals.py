"""Refusals of vLLM's as sentences alone, whose field stands in ``param`` of an answer.

vLLM 0.32 adds it to the sentence, and the value: `` (parameter=max_tokens, value=5000)``.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _alone(original: Any) -> Any:
    """Have an error say its sentence, and no more."""

    def __str__(self) -> str:
        return str(self.args[0])

    return __str__


PATCH = Patch(
    targets=("vllm.exceptions:VLLMValidationError.__str__",),
    make=_alone,
    why="a refusal repeated its field and value as Python writes them",
    models="every model of our server",
    first=(0, 28),
)
