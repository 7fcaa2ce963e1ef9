"""``POST /v1/attn_res/trace``: what every site of a prompt, or of an answer, attends to.

The tokens are served as any request is, then the workers replay them (``tracing.record``).
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field, model_validator
from safetensors.numpy import save

from attnres_serve import settings
from attnres_serve.compat import engine_config, openai_app, openai_server, requests
from attnres_serve.depth import edits as edit_lists
from attnres_serve.depth.edits import Count
from attnres_serve.depth.sites import Site, sites
from attnres_serve.errors import SettingError
from attnres_serve.model.config import spec_of
from attnres_serve.server import metrics, refusal
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.refusal import REFUSALS
from attnres_serve.server.routes import replays
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing import readings
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.question import Question, chosen_sites

SAFETENSORS = "application/octet-stream"  # the type of an answer with vectors
GONE = 499  # status of an answer that nobody waits for


class TraceRequest(Question):
    """The sequence to trace, exactly one of ``prompt`` and ``messages``, and what of it."""

    model: str | None = Field(None, description="name of the served model")
    prompt: str | list[Count] | None = Field(None, description="text or token ids")
    messages: list[dict[str, Any]] | None = Field(None, description="a chat, as in OpenAI's API")

    @model_validator(mode="after")
    def _one_source(self) -> "TraceRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        return self


class OneSentence(APIRoute):
    """A route whose refusal of a body is one sentence, not a list of pydantic's; it is counted."""

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
    responses={200: {"content": {SAFETENSORS: {}}}},
    dependencies=[Depends(_require_json)],
)
async def trace(body: TraceRequest, raw_request: Request):
    """Trace depth attention: weights, RMS of the sources and entropy at every site."""
    answer = await requests.until_disconnect(_trace, body, raw_request)
    return Response(status_code=GONE) if answer is None else answer


async def _trace(body: TraceRequest, raw_request: Request) -> Response:
    state = raw_request.app.state
    client, policy = state.engine_client, openai_server.policy_of(state.args) or Policy()
    places = await places_of(client)
    names = openai_app.served_names(state)
    if body.model is not None and body.model not in names:
        raise HTTPException(404, openai_app.no_such_model(state.openai_serving_models, body.model))
    try:
        chosen = chosen_sites(body.sites, [site for site in places if site.mixes])
    except SettingError as error:
        raise HTTPException(400, str(error)) from None
    weights = await requests.weights_of(client)
    given = await _prompt(body, raw_request)
    _check_length(client, policy, body, len(given))
    length = len(given) + body.max_tokens
    hidden = client.vllm_config.model_config.get_hidden_size()
    try:
        if body.edits:
            edit_lists.require_few_tokens(body.max_tokens, "max_tokens", "edits")
        positions = edit_lists.positions(body.tokens, length)
        edits = await asyncio.to_thread(edit_lists.resolve, body.edits, places, length, hidden)
        engine_config.require_few_logprobs(client.vllm_config, "logprobs", body.logprobs)
        engine_config.require_few_logprobs(client.vllm_config, "lens", body.lens)
        if body.lens is not None:
            readings.require_few(readings.readings(chosen), len(positions))
    except SettingError as error:
        raise HTTPException(400, str(error)) from None
    _check_weights(policy, len(positions), chosen, body)
    if body.vectors:
        _check_bytes(policy, len(positions), chosen, hidden)
    ids = given
    if body.max_tokens:
        name = f"attn-res-trace-{raw_request.headers.get('X-Request-Id') or uuid4().hex}"
        most = engine_config.longest_answer(client.vllm_config, body.max_tokens)
        answer = (
            await replays.generate(state, client, given, most, edits)
            if edits
            else await requests.generate(client, given, most, name)
        )
        ids = given + answer
    positions = [position for position in positions if position < len(ids)]  # it may end early
    following = trace_answer.following(ids, positions)
    lens = None
    if body.lens is not None:
        lens = readings.Lens(readings.readings(chosen), following, body.lens)
    indices = [site.index for site in chosen]
    asked = replays.Asked(ids, positions, indices, body.logprobs, lens, body.vectors)
    found = await replays.replay(state, client, asked, edits)
    texts_of = partial(requests.token_texts, client)
    texts = texts_of([ids[at] for at in positions])
    head = trace_answer.head(body.model or names[0], ids, len(given), positions, texts)
    head["edits"] = [edit.model_dump() for edit in body.edits]
    if body.logprobs is not None:
        plain = found
        if edits:
            own = asked._replace(sites=[], lens=None, vectors=False)
            plain = await replays.replay(state, client, own, [])

        def named(run: trace_answer.Found) -> list[dict[str, Any]]:
            assert run.predicted is not None, "they were asked for"
            return trace_answer.predictions(run.predicted, positions, following, texts_of)

        head["logprobs"] = {"unedited": named(plain), "edited": named(found) if edits else None}
    head["weights"] = weights[0]
    if await requests.weights_of(client) != weights:
        raise HTTPException(
            409, "The weights were replaced while this trace was computed; ask for it again."
        )
    if lens is not None:
        head["lens"] = readings.answered(chosen, positions, lens, found.lens, texts_of)
    pieces = [(site, *found.sites[site.index]) for site in chosen]
    content = await asyncio.to_thread(_encode, head, pieces, len(positions))
    if body.vectors:
        content = await asyncio.to_thread(_with_vectors, content, found.vectors)
        return Response(content, media_type=SAFETENSORS)
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
            raise HTTPException(501, _capital(problem))
    if await requests.is_asleep(client):
        raise HTTPException(503, "The engine is asleep; wake it up first.")
    return list(sites(spec))


async def _prompt(body: TraceRequest, raw_request: Request) -> list[int]:
    """The given tokens."""
    config = raw_request.app.state.engine_client.vllm_config.model_config
    if isinstance(body.prompt, list):
        ids = body.prompt
    elif config.skip_tokenizer_init:
        raise HTTPException(400, "This server has no tokenizer; give token ids as `prompt`.")
    else:
        found = await requests.tokenize(raw_request, body.prompt, body.messages)
        if isinstance(found, tuple):
            raise HTTPException(*found)
        ids = found
    if not ids:
        raise HTTPException(400, "The prompt is empty; give at least one token.")
    vocabulary = config.get_vocab_size()
    for token in ids:  # of a text too: a tokenizer may have more than the model
        if token >= vocabulary:
            raise HTTPException(
                400, f"Token {token} is not in the vocabulary of {vocabulary} tokens."
            )
    return ids


def _check_length(client, policy: Policy, body: TraceRequest, given: int) -> None:
    """Refuse a sequence that may become too long."""
    limit, flag = min(
        (client.vllm_config.model_config.max_model_len, "--max-model-len"),
        (policy.max_trace_tokens, "--max-trace-tokens"),
    )
    if given + body.max_tokens > limit:
        raise HTTPException(
            400,
            f"A traced sequence has at most {limit} tokens ({flag}); this one has {given} and "
            f"max_tokens {body.max_tokens}.",
        )


def _check_weights(policy: Policy, tokens: int, chosen: list[Site], body: TraceRequest) -> None:
    """Refuse an answer for too many tokens and sites; what counts is the numbers in it."""
    named = (body.logprobs or 0) * (2 if body.edits else 1)
    named += (body.lens or 0) * len(readings.readings(chosen))
    limit, weights = policy.max_trace_weights, sum(site.num_sources for site in chosen)
    if tokens * (weights + named) > limit:
        besides = f" and {named} logprobs" if named else ""
        raise HTTPException(
            400,
            f"A trace has at most {limit} weights (tokens x sites x their sources, "
            f"--max-trace-weights); {tokens} tokens x {len(chosen)} sites{besides} have "
            f"{tokens * (weights + named)}, so choose some by `tokens` and `sites`.",
        )


def _check_bytes(policy: Policy, tokens: int, chosen: list[Site], hidden: int) -> None:
    """Refuse vectors of too many bytes: of sources, mix and sublayer of each site."""
    size = 4 * tokens * hidden * sum(site.num_sources + 2 for site in chosen)
    if size > policy.max_trace_bytes:
        raise HTTPException(
            400,
            f"The vectors of a trace have at most {policy.max_trace_bytes} bytes "
            f"(--max-trace-bytes); those of {tokens} tokens x {len(chosen)} sites have {size}, so "
            "choose some by `tokens` and `sites`.",
        )


def _with_vectors(trace: bytes, vectors: Mapping[str, tuple[Sequence[int], bytes]]) -> bytes:
    """A safetensors file of the vectors by their names, and of the trace's JSON as ``trace``."""
    found = {
        name: np.frombuffer(own, np.float32).reshape(shape)
        for name, (shape, own) in vectors.items()
    }
    return save(found | {"trace": np.frombuffer(trace, np.uint8)})


def _encode(head: dict, pieces: list[tuple[Site, bytes, bytes]], rows: int) -> bytes:
    """The JSON of a trace, site by site, so that other threads run in between.

    Raises:
        HTTPException: it has a number that is none in JSON.
    """
    dump = partial(json.dumps, allow_nan=False)
    try:
        parts = [dump(trace_answer.traced_site(*piece, rows)) for piece in pieces]
        first = dump(head)
    except ValueError:
        raise HTTPException(
            500, "The trace has a number that is infinite or NaN, so there is no answer."
        ) from None
    return f'{first[:-1]}, "sites": [{", ".join(parts)}]}}'.encode()


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
