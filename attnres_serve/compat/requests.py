"""Calls of a running server to its engine."""

from collections.abc import Callable
from typing import Any

from attnres_serve import mistakes
from attnres_serve.compat.token_texts import texts_behind_another
from attnres_serve.compat.workarounds.replacing_calls import CHANGED


async def require_json(request) -> None:
    """Refuse a body that is not declared as JSON, like vLLM's routes."""
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    await validate_json_request(request)


async def until_disconnect(handler: Callable, body, request) -> Any:
    """The answer of ``handler(body, request)``; it is cancelled if the client disconnects."""
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation

    return await with_cancellation(handler)(body, request)


async def tokenize(
    request, prompt: str | None, messages: list[dict[str, Any]] | None
) -> list[int] | tuple[int, str]:
    """Token ids of a prompt or a chat, like in vLLM's routes; or a status and an error."""
    from pydantic import ValidationError
    from vllm.entrypoints.serve.tokenize.protocol import (
        TokenizeChatRequest,
        TokenizeCompletionRequest,
        TokenizeResponse,
    )

    try:
        body = (
            TokenizeCompletionRequest(prompt=prompt)
            if messages is None
            else TokenizeChatRequest(messages=messages)
        )
    except ValidationError as error:
        return 400, mistakes.first(error.errors(), {"messages": messages}).sentence
    answer = await request.app.state.serving_tokenization.create_tokenize(body, request)
    if isinstance(answer, TokenizeResponse):
        return list(answer.tokens)
    return answer.error.code, answer.error.message


async def ask_workers(client, method: str, *args) -> list[Any]:
    """The answers of all workers.

    Raises:
        EngineDeadError: the engine is dead; ``dead_engine.end_calls`` raises it in waiting calls.
    """
    answers: list[Any] = await client.collective_rpc(method, args=args)
    return answers


async def generate(
    client, ids: list[int], max_tokens: int, name: str, ignore_eos: bool = False
) -> list[int]:
    """Greedy continuation of a prompt by the engine; cancelling this aborts it.

    Raises:
        RuntimeError: the engine gave up before the end.
    """
    tokens: list[int] = []
    async for output in client.generate(*greedy(ids, max_tokens, ignore_eos), name):
        tokens = list(output.outputs[0].token_ids)
        if output.outputs[0].finish_reason in ("abort", "error"):
            raise RuntimeError("the engine ended a request before its answer was complete")
    return tokens


def greedy(ids: list[int], max_tokens: int, ignore_eos: bool = False) -> tuple[Any, Any]:
    """Prompt and parameters of a greedy request."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return tokens_input(ids), greedy


def stop_tokens(client) -> frozenset[int]:
    """The tokens that end a greedy answer of the engine."""
    config = client.vllm_config.model_config
    end = None if config.skip_tokenizer_init else client.get_tokenizer().eos_token_id
    _, params = greedy([], 1)
    params.update_from_generation_config(config.try_get_generation_config(), end)
    return frozenset(params.all_stop_token_ids)


def is_refusal(error: Exception) -> bool:
    """Whether the engine refused an invalid request, for which vLLM's routes answer 4xx.

    Older versions raise ValueError, 0.32 a class of vLLM. Faults of the engine raise other errors
    in all versions.
    """
    from vllm import exceptions

    return isinstance(error, (ValueError, getattr(exceptions, "VLLMClientError", ValueError)))


async def is_asleep(client) -> bool:
    """Whether the engine sleeps, which needs --enable-sleep-mode."""
    return client.vllm_config.model_config.enable_sleep_mode and await client.is_sleeping()


def token_texts(client, ids: list[int]) -> list[str | None]:
    """The text of each token after another one; None without a tokenizer."""
    if client.vllm_config.model_config.skip_tokenizer_init:
        return [None] * len(ids)
    return [*texts_behind_another(client.get_tokenizer(), ids)]


async def weights_of(client) -> tuple[str | None, float | None]:
    """The version of an engine's weights, and the time of their update in seconds since 1970.

    None for an engine without versions, before vLLM 0.32, and for the first weights.
    """
    if not hasattr(client, "get_weight_version"):
        return None, None
    return await client.get_weight_version(), getattr(client, CHANGED, None)
