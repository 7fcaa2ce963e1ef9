"""What clients are told of a dead engine; vLLM's sentence is about a stack trace above."""

from attnres_serve.compat.patch import Patch

SENTENCE = "The engine is dead; ask another server, or ask again later."


PATCH = Patch(  # of every answer that there is not, and of the log
    targets=("vllm.v1.engine.exceptions:EngineDeadError.__str__",),
    make=lambda own: lambda self: SENTENCE,
    why="answers named a stack trace above",
    models="every model of our server",
    first=(0, 28),
)
