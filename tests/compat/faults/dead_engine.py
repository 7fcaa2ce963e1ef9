"""What clients are told of a dead engine."""


def fault() -> bool:
    """The sentence is about a stack trace, which a client does not see."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return "stack trace" in str(EngineDeadError())
