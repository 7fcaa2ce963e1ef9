"""Logprobs of the prompt in a stream of several answers.

The first output of every answer has them.  vLLM 0.32 merges outputs that wait for streaming, and
drops the logprobs of an output merged into another answer's.  With ``echo``, the stream then fails
with an IndexError or a KeyError.
"""

from functools import wraps
from typing import Any

from attnres_serve.compat.patch import Patch


def _keeping(original: Any) -> Any:
    """Keep them when outputs are merged."""

    @wraps(original)
    def add(self, next_output, aggregate):
        if not self.prompt_logprobs:  # they are the same for all answers
            vars(self).update(prompt_logprobs=next_output.prompt_logprobs)
        original(self, next_output, aggregate)

    return add


PATCH = Patch(
    targets=("vllm.outputs:RequestOutput.add",),
    make=_keeping,
    why="streams with `echo` and several answers broke off",
    models="every model of our server",
    first=(0, 28),
    report="echo-of-several-answers",
)
