"""``POST /v1/attn_res/trace``: what every site of a prompt, or of an answer, attends to.

The tokens are served as any request is, then the workers replay them (``inspect.record``).
"""

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator

from attnres_serve import settings
from attnres_serve.compat import engine_config, openai_app, openai_server, requests
from attnres_serve.depth.sites import Site, sites
from attnres_serve.inspect import answer as trace_answer
from attnres_serve.inspect.answer import Trace
from attnres_serve.model.config import spec_of
from attnres_serve.server import metrics
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.refusal import REFUSALS

GONE = 499  # status of an answer that nobody waits for

Count = Annotated[int, Field(strict=True, ge=0)]


class TokenRange(BaseModel):
    """Positions from ``start`` up to, but not including, ``end``."""

    model_config = ConfigDict(extra="forbid")

    start: Count = 0
    end: Count | None = Field(None, description="default: the end of the sequence")


class TraceRequest(BaseModel):
    """The sequence to trace: exactly one of ``prompt`` and ``messages``."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="name of the served model")
    prompt: str | list[Count] | None = Field(None, description="text or token ids")
    messages: list[dict[str, Any]] | None = Field(None, description="a chat, as in OpenAI's API")
    max_tokens: Count = Field(0, description="greedy tokens that are generated and traced as well")
    sites: list[Count] | None = Field(None, description="indices; default: all that mix")
    tokens: list[Count] | TokenRange | None = Field(
        None, description="positions in prompt and answer; default: all"
    )

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
                raise HTTPException(400, _sentence(error.errors())) from None
            except HTTPException as error:
                outcome = "failed" if error.status_code == 500 else "refused"
                raise
            finally:
                metrics.traces.labels(outcome).inc()

        return handler


async def _require_json(raw_request: Request) -> None:
    await requests.require_json(raw_request)


router = APIRouter(tags=["Attention Residuals"], route_class=OneSentence, responses=REFUSALS)


@router.post("/v1/attn_res/trace", response_model=Trace, dependencies=[Depends(_require_json)])
async def trace(body: TraceRequest, raw_request: Request):
    """Trace depth attention: weights, RMS of the sources and entropy at every site."""
    answer = await requests.until_disconnect(_trace, body, raw_request)
    return Response(status_code=GONE) if answer is None else answer


async def _trace(body: TraceRequest, raw_request: Request) -> Response:
    state = raw_request.app.state
    client, policy = state.engine_client, openai_server.policy_of(state.args) or Policy()
    every = await _traceable_sites(client)
    names = openai_app.served_names(state)
    if body.model is not None and body.model not in names:
        raise HTTPException(404, f"The model `{body.model}` does not exist.")
    chosen = _chosen_sites(body.sites, every)
    given = await _prompt(body, raw_request)
    _check_length(client, policy, len(given), body.max_tokens)
    positions = _positions(body, len(given))
    _check_weights(policy, len(positions), chosen)
    ids = given
    if body.max_tokens:
        name = f"attn-res-trace-{raw_request.headers.get('X-Request-Id') or uuid4().hex}"
        most = engine_config.longest_answer(client.vllm_config, body.max_tokens)
        ids = given + await requests.generate(client, given, most, name)
    positions = [position for position in positions if position < len(ids)]  # it may end early
    wanted = [site.index for site in chosen]
    found = dict.fromkeys(wanted, (b"", b""))
    if positions:
        found = await _replay(state, client, ids[: positions[-1] + 1], positions, wanted)
    texts = requests.token_texts(client, [ids[at] for at in positions])
    head = trace_answer.head(body.model or names[0], ids, len(given), positions, texts)
    pieces = [(site, *found[site.index]) for site in chosen]
    content = await asyncio.to_thread(_encode, head, pieces, len(positions))
    return Response(content, media_type="application/json")


async def _traceable_sites(client) -> list[Site]:
    """The sites of the served model that mix.

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
    return [site for site in sites(spec) if site.mixes]


def _chosen_sites(wanted: list[int] | None, every: list[Site]) -> list[Site]:
    if wanted is None:
        return every
    known = {site.index: site for site in every}
    for index in wanted:
        if index not in known:
            raise HTTPException(
                400, f"There is no site {index}; this model's are 0 to {max(known)}."
            )
    return [known[index] for index in sorted(set(wanted))]


async def _prompt(body: TraceRequest, raw_request: Request) -> list[int]:
    """The given tokens."""
    config = raw_request.app.state.engine_client.vllm_config.model_config
    if isinstance(body.prompt, list):
        vocabulary = config.get_vocab_size()
        for token in body.prompt:
            if token >= vocabulary:
                raise HTTPException(
                    400, f"Token {token} is not in the vocabulary of {vocabulary} tokens."
                )
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
    return ids


def _positions(body: TraceRequest, given: int) -> list[int]:
    """The positions that were asked for, ascending, in a sequence that ends as late as it may."""
    length = given + body.max_tokens
    if isinstance(body.tokens, list):
        for position in body.tokens:
            if position >= length:
                raise HTTPException(
                    400, f"There is no token {position}; the sequence has at most {length}."
                )
        return sorted(set(body.tokens))
    chosen = body.tokens or TokenRange(start=0, end=None)
    end = length if chosen.end is None else min(chosen.end, length)
    if chosen.start >= end:
        raise HTTPException(
            400, f"The range of tokens is empty: from {chosen.start} to before {end}."
        )
    return list(range(chosen.start, end))


def _check_length(client, policy: Policy, given: int, generated: int) -> None:
    """Refuse a sequence that may become too long."""
    limit, flag = min(
        (client.vllm_config.model_config.max_model_len, "--max-model-len"),
        (policy.max_trace_tokens, "--max-trace-tokens"),
    )
    if given + generated > limit:
        raise HTTPException(
            400,
            f"A traced sequence has at most {limit} tokens ({flag}); this one has {given} and "
            f"max_tokens {generated}.",
        )


def _check_weights(policy: Policy, tokens: int, chosen: list[Site]) -> None:
    """Refuse an answer for too many tokens and sites; what counts is the numbers in it."""
    limit, weights = policy.max_trace_weights, tokens * sum(site.num_sources for site in chosen)
    if weights > limit:
        raise HTTPException(
            400,
            f"A trace has at most {limit} weights (tokens x sites x their sources, "
            f"--max-trace-weights); {tokens} tokens x {len(chosen)} sites have {weights}, so "
            "choose some by `tokens` and `sites`.",
        )


async def _replay(state, client, ids: list[int], positions: list[int], wanted: list[int]) -> dict:
    """Per site the bytes of weights and RMS, from the workers.

    One replay at a time, so that steps of other requests run between two of them.  A client that
    goes away leaves the queue; a replay that runs goes on to its end, for it cannot be stopped.
    """
    lock: asyncio.Lock = state.attn_res_replays
    await lock.acquire()
    running = asyncio.ensure_future(
        requests.ask_workers(client, "attn_res_trace", ids, positions, wanted)
    )
    running.add_done_callback(lambda _: lock.release())
    problem, found = trace_answer.merged(await asyncio.shield(running))
    if problem is not None:
        raise HTTPException(500, _capital(problem))
    return found


def _encode(head: dict, pieces: list[tuple[Site, bytes, bytes]], rows: int) -> bytes:
    """The JSON of a trace, site by site, so that other threads run in between."""
    parts = [json.dumps(trace_answer.traced_site(*piece, rows)) for piece in pieces]
    return f'{json.dumps(head)[:-1]}, "sites": [{", ".join(parts)}]}}'.encode()


def _sentence(errors) -> str:
    """One sentence about the first invalid field."""
    if not isinstance(errors[0], dict):  # vLLM's own, of the content type
        return f"{errors[0]}."
    if errors[0]["type"] == "json_invalid":
        return "The body is not valid JSON."
    first = list(errors[0]["loc"][1:2])
    said = [
        error["msg"].removeprefix("Value error, ")
        for error in errors
        if list(error["loc"][1:2]) == first
    ]
    reasons = " or ".join(dict.fromkeys(said))
    return f"{first[0]}: {reasons}." if first else f"{_capital(reasons)}."


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
