"""An answer that refuses, in the shape of OpenAI's errors."""

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse


class Error(BaseModel):
    """Why, in one sentence."""

    message: str
    type: str
    param: str | None = Field(description="the field that is meant, if it is known")
    code: int = Field(description="the status")


class Refusal(BaseModel):
    """The body of every refusal."""

    error: Error


# Of our routes, for the OpenAPI document.  An entry for 4XX takes the place of FastAPI's own 422,
# which nothing here answers.
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Refusal, "description": "no API key, or another one"},
    "4XX": {"model": Refusal, "description": "refused"},
    "5XX": {"model": Refusal, "description": "not answered, though the request may be right"},
}


async def of_router(_: Request, error: Exception) -> JSONResponse:
    """Answer what the router refuses, such as a path without a route; vLLM's handlers do not."""
    assert isinstance(error, HTTPException)
    answer = refuse(error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


def refuse(status: int, message: str, **headers: str) -> JSONResponse:
    """One sentence for the client; a name in ``headers`` has ``_`` instead of ``-``."""
    error = {
        "message": message,
        "type": HTTPStatus(status).phrase,
        "param": None,
        "code": status,
    }
    return JSONResponse(
        {"error": error}, status, {name.replace("_", "-"): value for name, value in headers.items()}
    )
