"""``POST /v1/attn_res/trace``: the weights of every site for a prompt and its completion.

The tokens are generated like those of any request, then the workers replay them
(``tracing.record``).
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field, model_validator

from attnres_serve import sentences, settings
from attnres_serve.compat import engine_config, openai_app, openai_server, requests
from attnres_serve.depth.edits import Count, positions_of
from attnres_serve.depth.resolved_edits import require_few_tokens, resolve
from attnres_serve.depth.sites import Site, sites
from attnres_serve.errors import SettingError
from attnres_serve.model.config import spec_of
from attnres_serve.server import metrics, refusal
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.refusal import REFUSALS
from attnres_serve.server.traces import edited_answer, logprobs, replays, vectors
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing import predicted, readings
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.options import TraceOptions, requested_sites

GONE = 499  # status of a response to a disconnected client


class TraceRequest(TraceOptions):
    """The sequence to trace, exactly one of ``prompt`` and ``messages``, and the options."""

    model: str | None = Field(None, description="name of the served model")
    prompt: str | list[Count] | None = Field(None, description="text or token ids")
    messages: list[dict[str, Any]] | None = Field(None, description="a chat, as in OpenAI's API")

    @model_validator(mode="after")
    def _one_source(self) -> "TraceRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        return self


class OneSentence(APIRoute):
    """A route that refuses a body with one sentence instead of pydantic's list; it is counted."""

    def get_route_handler(self) -> Callable:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            outcome = "failed"
            try:
                response = await handle(request)
                outcome = "cancelled" if response.status_code == GONE else "served"
                return response
            except RequestValidationError as error:
                outcome = "refused"
                raise HTTPException(400, refusal.of_errors(error).sentence) from None
            except HTTPException as error:
                outcome = "failed" if error.status_code == 500 else "refused"
                raise
            finally:
                metrics.traces.labels(outcome).inc()

        return handler


async def _require_json(raw_request: Request) -> None:
    await requests.require_json(raw_request)


router = APIRouter(tags=["Attention Residuals"], route_class=OneSentence, responses=REFUSALS)


@router.post(
    "/v1/attn_res/trace",
    response_model=TraceAnswer,
    responses={200: {"content": {vectors.SAFETENSORS: {}}}},
    dependencies=[Depends(_require_json)],
)
async def trace(body: TraceRequest, raw_request: Request):
    """Trace depth attention: weights, RMS of the sources and entropy at every site."""
    response = await requests.until_disconnect(_trace, body, raw_request)
    return Response(status_code=GONE) if response is None else response


async def _trace(body: TraceRequest, raw_request: Request) -> Response:
    state = raw_request.app.state
    client, policy = state.engine_client, openai_server.policy_of(state.args) or Policy()
    places = await places_of(client)
    names = openai_app.served_names(state)
    if body.model is not None and body.model not in names:
        raise HTTPException(404, openai_app.no_such_model(state.openai_serving_models, body.model))
    try:
        traced = requested_sites(body.sites, [site for site in places if site.mixes])
    except SettingError as error:
        raise HTTPException(400, str(error)) from None
    weights = await requests.weights_of(client)
    read = readings.readings(traced) if body.lens is not None else []
    prompt = await _prompt(body, raw_request)
    _check_length(client, policy, body, len(prompt))
    length = len(prompt) + body.max_tokens
    hidden = client.vllm_config.model_config.get_hidden_size()
    try:
        if body.edits:
            require_few_tokens(body.max_tokens, "max_tokens", "edits")
        positions = positions_of(body.tokens, length)
        edits = []
        if body.edits:
            edits = await asyncio.to_thread(resolve, body.edits, places, length, hidden)
        engine_config.require_few_logprobs(client.vllm_config, "logprobs", body.logprobs)
        engine_config.require_few_logprobs(client.vllm_config, "lens", body.lens)
        if body.lens is not None:
            readings.require_few(read, len(positions))
    except SettingError as error:
        raise HTTPException(400, str(error)) from None
    _check_weights(policy, len(positions), traced, body, len(read))
    if body.vectors:
        vectors.check_bytes(policy, len(positions), traced, hidden)
    ids = prompt
    if body.max_tokens:
        name = f"attn-res-trace-{raw_request.headers.get('X-Request-Id') or uuid4().hex}"
        most = engine_config.longest_answer(client.vllm_config, body.max_tokens)
        completion = (
            await edited_answer.generate(state, client, prompt, most, edits)
            if edits
            else await requests.generate(client, prompt, most, name)
        )
        ids = prompt + completion
        positions = [position for position in positions if position < len(ids)]  # it may end early
    lens = None
    if body.lens is not None:
        lens = readings.Lens(read, predicted.following(ids, positions), body.lens)
    indices = [site.index for site in traced]
    request = replays.ReplayRequest(ids, positions, indices, body.logprobs, lens, body.vectors)
    result = await replays.replay(state, client, request, edits)
    texts_of = partial(requests.token_texts, client)
    texts = texts_of([ids[at] for at in positions])
    fields = trace_answer.without_sites(body.model or names[0], ids, len(prompt), positions, texts)
    fields["edits"] = [edit.model_dump() | {"replace": edit.replace and ""} for edit in body.edits]
    if body.logprobs is not None:
        fields["logprobs"] = await logprobs.of(state, client, request, edits, result, texts_of)
    fields["weights"] = weights[0]
    if await requests.weights_of(client) != weights:
        raise HTTPException(
            409, "The weights were replaced while this trace was computed; ask for it again."
        )
    if lens is not None:
        fields["lens"] = readings.lens_readings(traced, positions, lens, result.lens, texts_of)
    pieces = [(site, *result.sites[site.index]) for site in traced]
    content = await asyncio.to_thread(_encode, fields, pieces, len(positions))
    if body.vectors:
        content = await asyncio.to_thread(vectors.with_vectors, content, result.vectors)
        return Response(content, media_type=vectors.SAFETENSORS)
    return Response(content, media_type="application/json")


async def places_of(client) -> list[Site]:
    """The sites of the served model.

    Raises:
        HTTPException: there are no traces on this server.
    """
    config = client.vllm_config
    if not settings.traces(config.additional_config):
        raise HTTPException(403, "This server was started with --disable-trace.")
    spec = spec_of(config.model_config.hf_config)
    if spec is None:
        raise HTTPException(400, "The served model has standard residuals: no site to trace.")
    if not engine_config.has_worker_extension(config):
        raise HTTPException(
            501, "A trace needs the workers' own extension, which --worker-extension-cls replaced."
        )
    for problem in await requests.ask_workers(client, "attn_res_untraceable"):
        if problem is not None:
            raise HTTPException(501, sentences.capital(problem))
    if await requests.is_asleep(client):
        raise HTTPException(503, "The engine is asleep; wake it up first.")
    return list(sites(spec))


async def _prompt(body: TraceRequest, raw_request: Request) -> list[int]:
    """The prompt's token ids."""
    config = raw_request.app.state.engine_client.vllm_config.model_config
    if isinstance(body.prompt, list):
        ids = body.prompt
    elif config.skip_tokenizer_init:
        raise HTTPException(400, "This server has no tokenizer; give token ids as `prompt`.")
    else:
        tokenized = await requests.tokenize(raw_request, body.prompt, body.messages)
        if isinstance(tokenized, tuple):
            raise HTTPException(*tokenized)
        ids = tokenized
    if not ids:
        raise HTTPException(400, "The prompt is empty; give at least one token.")
    vocabulary = config.get_vocab_size()
    for token in ids:  # also for a text: a tokenizer may have more tokens than the model
        if token >= vocabulary:
            raise HTTPException(
                400, f"Token {token} is not in the vocabulary of {vocabulary} tokens."
            )
    return ids


def _check_length(client, policy: Policy, body: TraceRequest, prompt_tokens: int) -> None:
    """Refuse a sequence that could become too long."""
    limit, flag = min(
        (client.vllm_config.model_config.max_model_len, "--max-model-len"),
        (policy.max_trace_tokens, "--max-trace-tokens"),
    )
    if prompt_tokens + body.max_tokens > limit:
        raise HTTPException(
            400,
            f"A traced sequence has at most {limit} tokens ({flag}); this one has {prompt_tokens} "
            f"and max_tokens {body.max_tokens}.",
        )


def _check_weights(
    policy: Policy, tokens: int, traced: list[Site], body: TraceRequest, lens_readings: int
) -> None:
    """Refuse a trace of too many tokens and sites, by the count of numbers in the response."""
    named = (body.logprobs or 0) * (2 if body.edits else 1)
    named += (body.lens or 0) * lens_readings
    limit, weights = policy.max_trace_weights, sum(site.num_sources for site in traced)
    if tokens * (weights + named) > limit:
        besides = f" and {named} logprobs" if named else ""
        raise HTTPException(
            400,
            f"A trace has at most {limit} weights (tokens x sites x their sources, "
            f"--max-trace-weights); {tokens} tokens x {len(traced)} sites{besides} have "
            f"{tokens * (weights + named)}, so choose some by `tokens` and `sites`.",
        )


def _encode(fields: dict, pieces: list[tuple[Site, bytes, bytes]], rows: int) -> bytes:
    """The JSON of a trace, encoded site by site, so that other threads run in between.

    Raises:
        HTTPException: it has NaN or infinity, which JSON lacks.
    """
    try:
        encoded = {name: _raw(value) for name, value in fields.items()}
        encoded_sites = [_raw(trace_answer.traced_site(*piece, rows)) for piece in pieces]
    except ValueError:
        raise HTTPException(
            500, "The trace has a number that is infinite or NaN, so there is no answer."
        ) from None
    return msgspec.json.encode(encoded | {"sites": encoded_sites})


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, allow_nan=False).encode())
