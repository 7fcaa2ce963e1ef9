"""vLLM's routes for a trainer's weights, which only ``--enable-weight-updates`` opens."""

from datetime import UTC, datetime

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from attnres_serve.compat import openai_app, requests
from attnres_serve.compat.workarounds.replacing_calls import NotWholeError, OrderError
from attnres_serve.errors import SettingError
from attnres_serve.server import metrics
from attnres_serve.server.refusal import refuse

# The routes of docs/use/rl.md; vLLM has more.
ROUTES = frozenset(
    f"/{name}"
    for name in (
        "pause",
        "resume",
        "is_paused",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
        "weight_info",
        "get_world_size",
    )
)


class Weights(BaseModel):
    """Which weights are served."""

    version: str = Field(description="what a trainer called them; `default` before it did")
    changed: str | None = Field(description="when they were last replaced; null for never")


def attach(app: FastAPI) -> None:
    """Open the routes."""
    openai_app.include_weight_routes(app, ROUTES)
    app.add_exception_handler(SettingError, of_update)


async def of_update(_: Request, error: Exception) -> JSONResponse:
    """The response to a refused update: 409 for a wrong order, 503 if nothing is served."""
    status = 503 if isinstance(error, NotWholeError) else 400
    return refuse(409 if isinstance(error, OrderError) else status, str(error))


async def weights_of(client) -> Weights | None:
    """The version of an engine's weights, and when they were changed; None before vLLM 0.32."""
    version, changed = await requests.weights_of(client)
    if version is None:
        return None
    metrics.tell_weights(version, changed)
    if changed is None:
        return Weights(version=version, changed=None)
    at = datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds")
    return Weights(version=version, changed=at)
