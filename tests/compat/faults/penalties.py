"""A ``length_penalty`` with which the scores of a beam search overflow."""

import asyncio
from types import SimpleNamespace
from typing import Any


def fault() -> bool:
    """The request is refused without the field, or an error that is none of a request ends it."""
    from vllm.exceptions import VLLMValidationError

    assert asyncio.run(searched(1.0)) == [[5]], "no beam was found"
    try:
        asyncio.run(searched(1e300))
    except (OverflowError, VLLMValidationError) as error:
        return "length_penalty" not in str(error)
    return False


async def searched(penalty: float) -> list[list[int]]:
    """The tokens of the beams that vLLM finds with a length penalty."""
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.sampling_params import BeamSearchParams

    async def generate(*_: Any, **__: Any):
        answer = SimpleNamespace(
            finish_reason="length", logprobs=[{5: SimpleNamespace(logprob=-1.0)}]
        )
        yield SimpleNamespace(outputs=[answer])

    tokenizer = SimpleNamespace(eos_token_id=2, decode=lambda *_, **__: "")
    server: Any = SimpleNamespace(
        engine_client=SimpleNamespace(
            generate=generate,
            input_processor=SimpleNamespace(resolve_watermarking=lambda params: None),
        ),
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer),
    )
    prompt: Any = {"type": "token", "prompt": "a", "prompt_token_ids": [3, 4]}
    params = BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=penalty)
    beams = BeamSearchOnlineMixin.beam_search(server, prompt, "name", params)
    return [[*one.token_ids] async for output in beams for one in output.outputs]
