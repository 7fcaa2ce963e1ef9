"""What clients are told of a dead engine."""

import asyncio
from types import SimpleNamespace
from typing import Any


def fault() -> bool:
    """A stack trace is named, which a client does not see; it is a 500, and ends the server."""
    from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import engine_error_handler
    from vllm.v1.engine.exceptions import EngineDeadError

    server = SimpleNamespace(should_exit=False)
    client = SimpleNamespace(errored=True, is_running=False)
    args = SimpleNamespace(log_error_stack=False)
    state = SimpleNamespace(server=server, engine_client=client, args=args)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    answer = asyncio.run(engine_error_handler(request, EngineDeadError()))
    return server.should_exit or answer.status_code == 500 or b"stack trace" in answer.body
