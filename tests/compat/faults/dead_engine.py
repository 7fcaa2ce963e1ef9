"""What clients are told of a dead engine."""


def fault() -> bool:
    """The sentence is about a stack trace, which a client does not see, and the status is 500."""
    from vllm.entrypoints.openai.models.serving import create_error_response
    from vllm.v1.engine.exceptions import EngineDeadError

    answer = create_error_response(EngineDeadError()).error
    return "stack trace" in answer.message or answer.code == 500
