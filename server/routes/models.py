"""``GET /v1/models/{id}``: one entry of ``GET /v1/models``, for clients that retrieve a model.

vLLM has only the list.
"""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse
from starlette.convertors import PathConvertor, register_url_convertor

from attnres_serve.compat import openai_app
from attnres_serve.server.refusal import REFUSALS, refuse

router = APIRouter(tags=["Models"], responses=REFUSALS)


class AnyName(PathConvertor):
    """A path with any characters; starlette's stops at a line break."""

    regex = "(?s:.*)"


register_url_convertor("any_name", AnyName())


@router.get("/v1/models/{name:any_name}", response_model=dict[str, Any])
async def model(name: str, request: Request):
    """The model or adapter of this name, which may have slashes."""
    if not name:  # like the list's route with a trailing slash
        return RedirectResponse("../models")
    for card in await openai_app.model_cards(request.app.state):
        if card["id"] == name:
            return card
    return refuse(404, openai_app.no_such_model(request.app.state.openai_serving_models, name))
