"""An answer that refuses, in the shape of OpenAI's errors."""

from http import HTTPStatus

from starlette.responses import JSONResponse


def refuse(status: int, message: str, **headers: str) -> JSONResponse:
    """One sentence for the client; a name in ``headers`` has ``_`` in the place of ``-``."""
    error = {
        "message": message,
        "type": HTTPStatus(status).phrase,
        "param": None,
        "code": status,
    }
    return JSONResponse(
        {"error": error}, status, {name.replace("_", "-"): value for name, value in headers.items()}
    )
