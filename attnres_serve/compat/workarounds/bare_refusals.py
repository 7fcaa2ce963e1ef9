"""Plain sentences in vLLM's refusals; answers have the field in ``param``.

vLLM 0.32 appends the field and the value: `` (parameter=max_tokens, value=5000)``.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _alone(original: Any) -> Any:
    """Let an error show only its sentence."""

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
