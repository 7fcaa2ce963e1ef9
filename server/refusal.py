"""Responses that refuse a request, in the shape of OpenAI's errors."""

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


# For the OpenAPI document of these routes.  The entry 4XX replaces FastAPI's 422, which no route
# here returns.
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Refusal, "description": "no API key, or another one"},
    "4XX": {"model": Refusal, "description": "refused"},
    "5XX": {"model": Refusal, "description": "not answered, though the request may be right"},
}


async def of_router(_: Request, error: Exception) -> JSONResponse:
    """The response to an error of the router, such as an unknown path; vLLM handles none."""
    assert isinstance(error, HTTPException)
    response = refuse(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def of_body(_: Request, error: Exception) -> JSONResponse:
    """The response to an invalid body: one sentence about its first mistake."""
    assert isinstance(error, RequestValidationError)
    mistake = of_errors(error)
    return refuse(400, mistake.sentence, param=mistake.field or None)


async def of_values(request: Request, error: Exception) -> JSONResponse:
    """The same for values of a body that vLLM validates later, within the route."""
    assert isinstance(error, ValidationError)
    body = getattr(request, "_json", None)  # the body as the route read it; it cannot be read again
    mistake = mistakes.first(error.errors(), body)
    return refuse(400, mistake.sentence, param=mistake.field or None)


async def of_depth(_: Request, error: Exception) -> JSONResponse:
    """The same for a body that is nested too deep for its parser."""
    assert isinstance(error, RecursionError)
    return refuse(400, "The body is nested too deep; send it flatter.")


def of_errors(error: RequestValidationError) -> Mistake:
    """The first mistake of a body."""
    errors = error.errors()
    if not isinstance(errors[0], dict):  # vLLM's error for the content type
        return Mistake("", f"{errors[0]}")
    if errors[0]["type"] == "json_invalid":
        reason, (_, place) = errors[0]["ctx"]["error"], errors[0]["loc"]
        return Mistake("", f"the body is not valid JSON ({reason} at character {place})")
    if errors[0]["loc"] == ("body",) and errors[0]["type"] != "value_error":
        return Mistake("", "the body has to be a JSON object")
    mistake = mistakes.first(errors, error.body, below=1)
    is_stop = mistake.field in STOPS and errors[-1]["type"] == "too_long"
    advice = f"; the server's variable {MORE_STOPS} allows more" if is_stop else ""
    return mistake._replace(reason=mistake.reason + advice)


def refuse(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    """A response that refuses a request with one sentence.

    Args:
        status: its status.
        message: the sentence.
        param: the invalid field, if it is known.
        headers: further headers, with ``_`` instead of ``-``.
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
