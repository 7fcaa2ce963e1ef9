"""What the sentence of a refusal ends with."""


def fault() -> bool:
    """Its field and value follow the sentence."""
    from vllm.entrypoints.openai.models.serving import create_error_response
    from vllm.exceptions import VLLMValidationError

    error = VLLMValidationError("It is too long.", parameter="max_tokens", value=5000)
    return create_error_response(error).error.message != "It is too long."
