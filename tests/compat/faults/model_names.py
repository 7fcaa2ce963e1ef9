"""Names in the answer to a request for a model that there is not."""

import asyncio
from types import SimpleNamespace
from typing import Any


def fault() -> bool:
    """The served names are not all in the answer."""
    said = asked("yours", ["mine", "other"], {"tuned": None}).error.message
    return not all(name in said for name in ("mine", "other", "tuned"))


def asked(name: str, served: list[str], adapters: dict[str, Any]) -> Any:
    """What vLLM answers to a request for a model; None if it serves that."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.engine.serving import BaseServing

    serving: Any = BaseServing.__new__(BaseServing)
    serving.request_logger = None
    serving.models = SimpleNamespace(
        base_model_paths=[SimpleNamespace(name=name) for name in served],
        is_base_model=lambda name: name in served,
        lora_requests=adapters,
    )
    return asyncio.run(serving._check_model(CompletionRequest(model=name, prompt="a")))
