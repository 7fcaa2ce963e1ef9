"""Logprobs of the prompt in a stream of several answers.

The first output of every answer brings them.  vLLM 0.32 merges outputs that wait to be streamed and
drops those of an output that is merged into one of another answer.  With ``echo``, the stream then
breaks off by an IndexError or a KeyError.
"""

from functools import wraps
from typing import Any


def give_to_every_answer() -> None:
    """Keep them where outputs are merged (idempotent)."""
    from vllm.outputs import RequestOutput

    cls: Any = RequestOutput
    own = cls.add
    if getattr(own, "keeps_prompt_logprobs", False):
        return

    @wraps(own)
    def add(self, next_output, aggregate):
        if not self.prompt_logprobs:  # those of another answer are the same
            vars(self).update(prompt_logprobs=next_output.prompt_logprobs)
        own(self, next_output, aggregate)

    add.keeps_prompt_logprobs = True  # type: ignore[attr-defined]
    cls.add = add
