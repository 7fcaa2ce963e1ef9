"""An answer that refuses, in the shape of OpenAI's errors."""

from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from attnres_serve import mistakes
from attnres_serve.compat.workarounds.long_refusals import for_client
from attnres_serve.mistakes import Mistake

STOPS = ("stop", "stop_sequences")
MORE_STOPS = "VLLM_MAX_STOP_STRINGS"


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


async def of_body(_: Request, error: Exception) -> JSONResponse:
    """Answer a body that a route cannot read by one sentence about its first mistake."""
    assert isinstance(error, RequestValidationError)
    found = of_errors(error)
    return refuse(400, found.sentence, param=found.field or None)


async def of_values(request: Request, error: Exception) -> JSONResponse:
    """The same for what vLLM reads of a body when it has begun to answer."""
    assert isinstance(error, ValidationError)
    body = getattr(request, "_json", None)  # as the route read it; it cannot be read again
    found = mistakes.first(error.errors(), body)
    return refuse(400, found.sentence, param=found.field or None)


async def of_depth(_: Request, error: Exception) -> JSONResponse:
    """The same for one that is nested deeper than what reads it can follow."""
    assert isinstance(error, RecursionError)
    return refuse(400, "The body is nested too deep; send it flatter.")


def of_errors(error: RequestValidationError) -> Mistake:
    """The first mistake of a body."""
    errors = error.errors()
    if not isinstance(errors[0], dict):  # vLLM's own, of the content type
        return Mistake("", f"{errors[0]}")
    if errors[0]["type"] == "json_invalid":
        said, (_, place) = errors[0]["ctx"]["error"], errors[0]["loc"]
        return Mistake("", f"the body is not valid JSON ({said} at character {place})")
    if errors[0]["loc"] == ("body",) and errors[0]["type"] != "value_error":
        return Mistake("", "the body has to be a JSON object")
    found = mistakes.first(errors, error.body, below=1)
    is_stop = found.field in STOPS and errors[-1]["type"] == "too_long"
    advice = f"; the server's variable {MORE_STOPS} allows more" if is_stop else ""
    return found._replace(reason=found.reason + advice)


def refuse(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    """One sentence for the client; a name in ``headers`` has ``_`` instead of ``-``.

    Args:
        status: of the answer.
        message: the sentence.
        param: the field that is meant, if it is one.
        headers: further ones of the answer.
    """
    error = {
        "message": for_client(message),
        "type": HTTPStatus(status).phrase,
        "param": param,
        "code": status,
    }
    return JSONResponse(
        {"error": error}, status, {name.replace("_", "-"): value for name, value in headers.items()}
    )
