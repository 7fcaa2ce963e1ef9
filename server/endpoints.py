"""The ``vllm.endpoint_plugins`` entry point: the routes of attnres-serve on vLLM's OpenAI app."""

import asyncio

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from attnres_serve import settings
from attnres_serve.compat import (
    changing_edits,
    engine_config,
    host,
    openai_app,
    openai_server,
    prepare,
    token_counts,
    token_shards,
)
from attnres_serve.depth.sites import sites
from attnres_serve.model.config import spec_of
from attnres_serve.server import access_log, lifecycle, metrics, passes, refusal
from attnres_serve.server.bounds.fail_fast import read_to_first_error
from attnres_serve.server.bounds.guard import Guard
from attnres_serve.server.bounds.limits import Limits
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.head_requests import HeadRequests
from attnres_serve.server.routes import edits, info, models, page, statistics, trace, weights
from attnres_serve.server.weight_versions import WeightVersions


class EndpointPlugin:
    """See vLLM's ``EndpointPlugin`` protocol."""

    name = "attnres"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(info.router)
        app.include_router(trace.router)
        app.include_router(statistics.router)
        app.include_router(models.router)
        app.include_router(page.router)
        app.include_router(lifecycle.router)
        policy = openai_server.policy_of(app.state.args) or Policy()
        if policy.enable_weight_updates:
            weights.attach(app)
        changes = _may_change_edits(app.state.args)
        if changes:
            edits.attach(app)
        if changes or policy.enable_weight_updates:
            app.add_middleware(WeightVersions)
        app.state.attn_res_lifecycle = lifecycle.Lifecycle(policy.drain_delay)
        app.add_middleware(lifecycle.Gate, lifecycle=app.state.attn_res_lifecycle)
        app.add_exception_handler(HTTPException, refusal.of_router)
        app.add_exception_handler(ValidationError, refusal.of_values)
        app.add_exception_handler(RecursionError, refusal.of_depth)
        openai_app.refuse_bodies_by(refusal.of_body)
        openai_app.read_http_by("attnres_serve.server.bounds.headers:BoundedHeaders")
        protect(app)
        if changes:  # innermost: requests that are refused or still arrive have no turn
            app.user_middleware.append(Middleware(app.state.attn_res_turns.wrap))
        read_to_first_error(app)
        prepare.routes()
        log_access(app)

    async def init_state(self, engine_client, state, args) -> None:
        """The routes reach the engine through ``state.engine_client``."""
        state.attn_res_replays = asyncio.Lock()
        await state.attn_res_lifecycle.begin(engine_client, state)
        prepare.server(engine_client)
        token_counts.count(engine_client)
        spec = spec_of(engine_client.vllm_config.model_config.hf_config)
        if spec is not None:
            rows = max(site.num_sources for site in sites(spec))
            config = engine_client.vllm_config
            metrics.tell_edits(changing_edits.served(engine_client))
            metrics.bank.set(rows * engine_config.bytes_of_a_row(config, token_shards.most(config)))
            if engine_config.is_first_api_server(engine_client.vllm_config):
                state.attn_res_counting = asyncio.create_task(passes.keep_counting(engine_client))


def _may_change_edits(args) -> bool:
    """Whether the route is open by which edits change: with a key alone, whatever started us."""
    changes = settings.edits_change(getattr(args, "additional_config", None))
    return changes and bool(openai_server.api_keys(args))


def protect(app: FastAPI) -> None:
    """Guard and bound every route of the app, including vLLM's.

    Innermost: after CORS, which answers browsers, and inside vLLM's metrics, which then count
    refused requests.
    """
    args = app.state.args
    policy = openai_server.policy_of(args) or Policy()
    keys, place = openai_server.api_keys(args), openai_server.listens_on(args)
    if not keys and place == "network":
        host.logger().warning(
            "AttnRes: there is no API key and this server listens beyond loopback, so whoever "
            "reaches it may use it; set VLLM_API_KEY, or give attnres-serve --api-key-file."
        )
    openai_app.guard_instead_of_vllm(app)
    app.user_middleware += [
        Middleware(
            Guard,
            keys,
            policy.public_metrics,
            local_only=not keys and place == "loopback",
            closed=openai_app.closed_routes(args)
            | ({} if _may_change_edits(args) else edits.CLOSED),
        ),
        Middleware(Limits, policy),
        Middleware(HeadRequests),
    ]


def log_access(app: FastAPI) -> None:
    """Log every request; for probes and scrapes only failures, unless a flag says otherwise."""
    has_flag = openai_app.has_paths_without_access_lines(app.state.args)
    state: lifecycle.Lifecycle = app.state.attn_res_lifecycle

    def is_quiet(path: str, status: int) -> bool:
        is_probe = path in lifecycle.ANSWERED and not has_flag
        return is_probe and (status < 500 or state.stopping)

    openai_app.around(app, lambda whole: access_log.AccessLog(whole, is_quiet))


def make_plugin() -> EndpointPlugin:
    return EndpointPlugin()
