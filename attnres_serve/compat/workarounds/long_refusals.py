"""What clients are told of a refusal, at the length of a sentence.

vLLM 0.32 hands on whatever a library says, and repeats a client's own grammar or name of 100 kB.
This can go with a vLLM that bounds the message of its errors.
"""

from typing import Any

from attnres_serve import sentences
from attnres_serve.compat import host


def cut_long_messages() -> None:
    """Cut the message of every error that vLLM's routes answer (idempotent)."""
    from vllm.entrypoints.serve.engine import serving

    answer: Any = serving.ErrorResponse
    cls: Any = answer.model_fields["error"].annotation  # ErrorInfo, wherever a version has it
    own = cls.__init__
    if getattr(own, "cuts", False):
        return

    def __init__(self, **given: Any) -> None:
        if isinstance(given.get("message"), str):
            given["message"] = for_client(given["message"])
        own(self, **given)

    __init__.cuts = True  # type: ignore[attr-defined]
    cls.__init__ = __init__


def for_client(message: str) -> str:
    """A message at the length of a sentence; the log has the whole of a longer one."""
    if len(message) <= sentences.MOST:
        return message
    host.logger().info("AttnRes: an answer was cut, whose whole message is %r", message)
    return sentences.cut(message, "the server's log with --verbose has the whole")
