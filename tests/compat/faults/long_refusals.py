"""The length of an error's message."""


def fault() -> bool:
    """A client gets all that it sent back in an error."""
    from vllm.entrypoints.openai.models.serving import create_error_response

    return len(create_error_response("a" * 100_000).error.message) > 10_000
