"""``GET /v1/attn_res``: the served model, and its forward passes."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from attnres_serve import __version__, settings
from attnres_serve.compat import changing_edits, openai_server
from attnres_serve.depth.edits import Edit
from attnres_serve.depth.sites import Site, sites
from attnres_serve.families import BY_ARCHITECTURE
from attnres_serve.model.config import spec_of
from attnres_serve.server import passes, refusal
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.routes.weights import Weights, weights_of
from attnres_serve.tracing import readings

router = APIRouter(tags=["Attention Residuals"], responses=refusal.REFUSALS)


class TraceLimits(BaseModel):
    """How large a trace may be, and how much one token of all sites takes of it."""

    weights: int = Field(description="numbers of an answer at most (--max-trace-weights)")
    weights_per_token: int = Field(description="sources of all sites together")
    lens: int = Field(description="vectors that a lens reads at most")
    lens_per_token: int = Field(description="mixes, sums of blocks and partial sums together")


class AttnResInfo(BaseModel):
    """What is served and how its depth attention is computed."""

    version: str = Field(description="version of attnres-serve")
    format: str | None = Field(description="checkpoint format that was recognised")
    backbone: str | None = Field(description="model family whose decoder is used")
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
    edits: list[Edit] = Field(description="under which the model is served")
    trace: TraceLimits | None = Field(description="null where nothing can be traced")
    weights: Weights | None = Field(description="null where the engine does not tell")


@router.get("/v1/attn_res")
async def attn_res(request: Request) -> AttnResInfo:
    """Describe the depth attention of the served model."""
    client = request.app.state.engine_client
    config = client.vllm_config.model_config.hf_config
    family = BY_ARCHITECTURE.get((config.architectures or [""])[0])
    info: dict[str, Any] = {
        "version": __version__,
        "format": getattr(config, "attn_res_format", None),
        "backbone": family.name if family else None,
        "blocks": 0,
        "block_starts": [],
        "sites": 0,
        "backend": None,
        "algorithm": None,
        "executed": {},
        "executed_compiled": {},
        "edits": changing_edits.served(client),
        "trace": None,
        "weights": await weights_of(client),
    }
    spec = spec_of(config) if family else None
    if spec is not None:
        executed = await passes.executed(client)
        places = sites(spec)
        info |= {
            "blocks": spec.num_blocks,
            "block_starts": list(spec.block_starts),
            "sites": len(places),
            "backend": await passes.ask_first_worker(client, "attn_res_backend"),
            "algorithm": await passes.ask_first_worker(client, "attn_res_algorithm"),
            "executed": {name: sum(counts.values()) for name, counts in executed.items()},
            "executed_compiled": {name: counts["compiled"] for name, counts in executed.items()},
        }
        if settings.traces(client.vllm_config.additional_config):
            policy = openai_server.policy_of(request.app.state.args) or Policy()
            info["trace"] = trace_limits(places, policy)
    return AttnResInfo(**info)


def trace_limits(places: Sequence[Site], policy: Policy) -> TraceLimits:
    """The limits of traces of a model with these sites."""
    mixing = [site for site in places if site.mixes]
    return TraceLimits(
        weights=policy.max_trace_weights,
        weights_per_token=sum(site.num_sources for site in mixing),
        lens=readings.MOST,
        lens_per_token=len(readings.readings(mixing)),
    )
