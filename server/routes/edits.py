"""``/v1/attn_res/edits``: edits that change between requests, with ``--enable-attnres-edits``."""

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from attnres_serve.compat import changing_edits, requests
from attnres_serve.depth import static_edits
from attnres_serve.depth.edits import MOST, Edit
from attnres_serve.errors import SettingError
from attnres_serve.model.config import spec_of
from attnres_serve.server import metrics, refusal
from attnres_serve.server.routes.weights import of_update
from attnres_serve.server.turns import Turns

PATH = "/v1/attn_res/edits"
CLOSED = {PATH: f"{changing_edits.FLAG} and an API key"}  # what opens it
LONGEST = 600.0  # seconds

router = APIRouter(tags=["Attention Residuals"], responses=refusal.REFUSALS)


def attach(app: FastAPI) -> None:
    """Open the routes."""
    app.include_router(router)
    app.add_exception_handler(SettingError, of_update)
    app.state.attn_res_turns = Turns()


class NewEdits(BaseModel, extra="forbid"):
    """Edits that take the place of those that are served."""

    edits: list[Edit] = Field(max_length=MOST, description="for every token; none for no edits")
    wait: float = Field(
        LONGEST, ge=0, le=LONGEST, description="seconds that running requests have to end; else 409"
    )


class ServedEdits(BaseModel):
    """What is served."""

    edits: list[dict[str, Any]] = Field(description="in the order in which they are applied")
    version: str = Field(description="of weights and edits, as answers and traces state it")


@router.get(PATH)
async def served(request: Request) -> ServedEdits:
    """The edits that the model is served under."""
    client = request.app.state.engine_client
    edits = static_edits.to_json(changing_edits.served(client))
    return ServedEdits(edits=edits, version=(await requests.weights_of(client))[0] or "")


@router.put(PATH)
async def change(body: NewEdits, request: Request) -> ServedEdits:
    """Change them, when the requests that run have ended; new ones wait meanwhile."""
    state = request.app.state
    spec = spec_of(state.engine_client.vllm_config.model_config.hf_config)
    await asyncio.to_thread(static_edits.resolve, body.edits, spec)
    try:
        async with state.attn_res_turns.change(body.wait):
            await changing_edits.change(state.engine_client, body.edits)
            metrics.tell_edits(body.edits)
            return await served(request)
    except TimeoutError:
        raise HTTPException(
            409,
            f"Requests or another change still run after {body.wait:g} seconds, so the edits stay "
            f"as they are; give them longer by `wait`, at most {LONGEST:g}.",
        ) from None
