"""The ``vllm.endpoint_plugins`` entry point: our routes on vLLM's own OpenAI app."""

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from attnres_serve import __version__, compat, settings
from attnres_serve.configs import spec_of
from attnres_serve.families import BY_ARCHITECTURE
from attnres_serve.schedule import sites
from attnres_serve.server import lifecycle, metrics, models, page, refusal, trace
from attnres_serve.server.fail_fast import read_to_first_error
from attnres_serve.server.guard import Guard
from attnres_serve.server.limits import Limits
from attnres_serve.server.policy import Policy

PERIOD = 10  # seconds between two questions to the workers about their forward passes

router = APIRouter(tags=["Attention Residuals"], responses=refusal.REFUSALS)


class AttnResInfo(BaseModel):
    """What is served and how its depth attention is computed."""

    version: str = Field(description="version of attnres-serve")
    format: str | None = Field(description="checkpoint format that was recognised")
    backbone: str | None = Field(description="base family whose decoder is used")
    blocks: int = Field(description="blocks of sublayers; 0 with standard residuals")
    block_starts: list[int] = Field(description="first sublayer of every block")
    sites: int = Field(description="places where sources are mixed, the final one included")
    backend: str | None = Field(description="what computes the sites")
    algorithm: str | None = Field(description="algorithm that was chosen")
    executed: dict[str, int] = Field(
        description="forward passes by algorithm since the start, warm-up and profiling included"
    )
    executed_compiled: dict[str, int] = Field(
        description="those of them that ran in a compiled graph"
    )


@router.get("/v1/attn_res")
async def attn_res(request: Request) -> AttnResInfo:
    """Describe the depth attention of the served model."""
    client = request.app.state.engine_client
    config = client.vllm_config.model_config.hf_config
    backbone = BY_ARCHITECTURE.get((config.architectures or [""])[0])
    info: dict[str, Any] = {
        "version": __version__,
        "format": getattr(config, "attn_res_format", None),
        "backbone": backbone,
        "blocks": 0,
        "block_starts": [],
        "sites": 0,
        "backend": None,
        "algorithm": None,
        "executed": {},
        "executed_compiled": {},
    }
    spec = spec_of(config) if backbone else None
    if spec is not None:
        passes = await executed(client)
        info |= {
            "blocks": spec.num_blocks,
            "block_starts": list(spec.block_starts),
            "sites": len(sites(spec)),
            "backend": await ask_first_worker(client, "attn_res_backend"),
            "algorithm": settings.algorithm(client.vllm_config.additional_config),
            "executed": {name: sum(counts.values()) for name, counts in passes.items()},
            "executed_compiled": {name: counts["compiled"] for name, counts in passes.items()},
        }
    return AttnResInfo(**info)


async def executed(client) -> dict[str, dict[str, int]]:
    """Forward passes since the start by algorithm and mode; ``/metrics`` says the same."""
    passes = await ask_first_worker(client, "attn_res_executed") or {}
    if compat.is_first_api_server(client.vllm_config):  # each would count all of them
        metrics.count_passes(passes)
    return passes


async def keep_counting(client) -> None:
    """Ask the workers from time to time, so that no scrape has to wait for them."""
    failing = False
    while not client.errored:
        try:
            await executed(client)
            failing = False
        except Exception as error:  # the next time may go well
            if not failing and not client.errored:  # a dead engine has its own end (``lifecycle``)
                compat.logger().warning("AttnRes: forward passes are not counted: %s", error)
            failing = True
        await asyncio.sleep(PERIOD)


async def ask_first_worker(client, method: str) -> Any:
    """A method of ``worker.WorkerExtension``.

    None where an extension of the user's replaced it, and while the engine sleeps: the memory of a
    sleeping model cannot be read.
    """
    if not compat.has_worker_extension(client.vllm_config) or await compat.is_asleep(client):
        return None
    # Every worker runs every pass with the same settings, so the first one stands for all.
    return (await compat.ask_workers(client, method))[0]


class EndpointPlugin:
    """See vLLM's ``EndpointPlugin`` protocol."""

    name = "attnres"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.include_router(trace.router)
        app.include_router(models.router)
        app.include_router(page.router)
        app.include_router(lifecycle.router)
        app.state.attn_res_lifecycle = lifecycle.Lifecycle()
        app.add_middleware(lifecycle.Gate, lifecycle=app.state.attn_res_lifecycle)
        app.add_exception_handler(HTTPException, refusal.of_router)
        compat.read_http_by("attnres_serve.server.headers:BoundedHeaders")
        protect(app)
        read_to_first_error(app)

    async def init_state(self, engine_client, state, args) -> None:
        """The routes reach the engine through ``state.engine_client``."""
        state.attn_res_replays = asyncio.Lock()
        await state.attn_res_lifecycle.begin(engine_client, state)
        compat.refuse_beyond_workers(engine_client)
        spec = spec_of(engine_client.vllm_config.model_config.hf_config)
        if spec is not None:
            rows = max(site.num_sources for site in sites(spec))
            metrics.bank.set(rows * compat.bytes_of_a_row(engine_client.vllm_config))
            if compat.is_first_api_server(engine_client.vllm_config):
                state.attn_res_counting = asyncio.create_task(keep_counting(engine_client))


def protect(app: FastAPI) -> None:
    """Guard and bound every route of the app, vLLM's own included.

    Innermost: behind CORS, which answers for browsers, and inside vLLM's metrics, which then count
    what is refused here.
    """
    args = app.state.args
    policy = compat.policy_of(args) or Policy()
    keys, place = compat.api_keys(args), compat.listens_on(args)
    if not keys and place == "network":
        compat.logger().warning(
            "AttnRes: there is no API key and this server listens beyond loopback, so whoever "
            "reaches it may use it; set VLLM_API_KEY, or give attnres-serve --api-key-file."
        )
    app.user_middleware += [
        Middleware(
            Guard,
            keys,
            policy.public_metrics,
            local_only=not keys and place == "loopback",
            closed=compat.closed_routes(args),
        ),
        Middleware(Limits, policy, compat.calls_tools(args)),
    ]


def make_plugin() -> EndpointPlugin:
    return EndpointPlugin()
