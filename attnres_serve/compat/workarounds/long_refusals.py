"""Limits of the length of refusals.

vLLM 0.32 passes on all messages of libraries, and repeats a client's grammar or name of 100 kB.
Remove this with a vLLM that bounds the messages of its errors.
"""

from dataclasses import replace
from typing import Any

from attnres_serve import sentences
from attnres_serve.compat import host
from attnres_serve.compat.patch import Patch


def _cutting(original: Any) -> Any:
    """Shorten the message of every error of vLLM's routes."""

    def __init__(self, **options: Any) -> None:
        if isinstance(options.get("message"), str):
            options["message"] = for_client(options["message"])
        original(self, **options)

    return __init__


def for_client(message: str) -> str:
    """A message, shortened to fit; the log has the whole text."""
    if len(message) <= sentences.MOST:
        return message
    host.logger().info("AttnRes: an answer was cut, whose whole message is %r", message)
    return sentences.cut(message, "the server's log with --verbose has the whole")


LATER = Patch(
    targets=("vllm.entrypoints.serve.engine.protocol:ErrorInfo.__init__",),
    make=_cutting,
    why="a refusal repeated 100 kB of what a client sent",
    models="every model of our server",
    first=(0, 29),
)
EARLIER = replace(
    LATER,
    targets=("vllm.entrypoints.openai.engine.protocol:ErrorInfo.__init__",),
    first=(0, 28),
    last=(0, 28),
)
PATCHES = LATER, EARLIER
