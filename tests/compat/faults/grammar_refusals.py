"""docs/build/upstream/grammars-of-two-backends.md"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attnres_serve.checkpoints import tokenizer

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "checkpoint"


def fault() -> bool:
    """A regular expression is refused in several lines."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))
    model: Any = SimpleNamespace(is_diffusion=False)
    backend: Any = SimpleNamespace(backend="auto")
    try:
        params._validate_structured_outputs(model, backend, tokenizer.load(DEMO))
    except VLLMValidationError as error:
        return "\n" in str(error).strip()
    raise AssertionError("a wrong regular expression was accepted")
