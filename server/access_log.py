"""One line for every finished request: its duration, its tokens and its id.

uvicorn's logger writes the lines, so vLLM's flags and a logging configuration apply.  uvicorn's
access lines, written at the start of a response, lack this information; they are dropped.
"""

import logging
import os
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG
from uvicorn.logging import AccessFormatter
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from attnres_serve.compat import token_counts
from attnres_serve.compat.token_counts import TokenCounts
from attnres_serve.server.request_ids import HEADER, USABLE
from attnres_serve.server.start import levels

LOGGER = logging.getLogger("uvicorn.access")
LEFT = 499  # status of a request whose client disconnected, as in nginx
MARK = "duration_s"  # a field that only these lines have
MESSAGE = '%s - "%s %s HTTP/%s" %d'  # uvicorn's format, whose arguments vLLM's path filter reads


class AccessLog:
    """ASGI middleware around the whole app: it sees the responses of every middleware.

    Args:
        app: the wrapped app.
        is_quiet: whether a request with this path and status has no line.
    """

    def __init__(self, app: ASGIApp, is_quiet: Callable[[str, int], bool]) -> None:
        self.app = app
        self.is_quiet = is_quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # uvicorn has configured its loggers before
            _take_over()
        if scope["type"] == "http" and LOGGER.hasHandlers() and LOGGER.isEnabledFor(logging.INFO):
            await self._log(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _log(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        counts = token_counts.begin()
        status, name = HTTPStatus.INTERNAL_SERVER_ERROR.value, None
        is_whole = has_left = False

        async def receive_watched() -> Message:
            nonlocal has_left
            message = await receive()
            has_left |= message["type"] == "http.disconnect" and not is_whole
            return message

        async def send_watched(message: Message) -> None:
            nonlocal status, name, is_whole
            if message["type"] == "http.response.start":
                status, name = message["status"], Headers(raw=message["headers"]).get(HEADER)
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive_watched, send_watched)
        finally:
            if has_left:
                status = LEFT
            if not self.is_quiet(get_route_path(scope), status):
                name = name or Headers(scope=scope).get(HEADER, "")
                seconds = time.perf_counter() - begin
                _write(scope, status, name, seconds, counts)


def _write(scope: Any, status: int, name: str, seconds: float, counts: TokenCounts) -> None:
    is_known = counts.prompt is not None and not counts.uncounted
    fields: dict[str, Any] = {
        "client": get_client_addr(scope),
        "method": scope["method"],
        "path": get_path_with_query_string(scope),
        "status": status,
        MARK: round(seconds, 4),
        "tokens_in": counts.prompt,
        "tokens_out": counts.answer if is_known else None,
        "tokens_per_s": round(counts.answer / seconds, 1) if is_known else None,
        "request_id": name if USABLE.fullmatch(name) else None,
    }
    request = [fields[key] for key in ("client", "method", "path")]
    text = MESSAGE + _figures(fields).replace("%", "%%")
    LOGGER.info(text, *request, scope["http_version"], status, extra=fields)


def _figures(fields: dict[str, Any]) -> str:
    """The text of a line after the status."""
    shown = {key: "-" if value is None else value for key, value in fields.items()}
    return (
        f" {shown[MARK]:.3f}s in={shown['tokens_in']} out={shown['tokens_out']} "
        f"tok/s={shown['tokens_per_s']} id={shown['request_id']}"
    )


class _Formatter(AccessFormatter):
    """uvicorn's formatter, which prints only the arguments of a line, with time and figures."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) + _figures(record.__dict__)


USUAL = LOGGING_CONFIG["formatters"]["access"]["fmt"]  # vLLM keeps it
FORMAT = '%(levelprefix)s %(asctime)s %(client_addr)s - "%(request_line)s" %(status_code)s'
DATE = "%Y-%m-%dT%H:%M:%S%z"


def _is_ours(record: logging.LogRecord) -> bool:
    return MARK in record.__dict__


def _take_over() -> None:
    """Drop uvicorn's access lines, and let its default format print the new fields.

    A user's format is not changed; it can use the fields by name.  uvicorn's other messages are
    left out if vLLM logs only warnings and errors.
    """
    if os.environ.get(levels.LEVEL) == levels.QUIET:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if _is_ours not in LOGGER.filters:
        LOGGER.addFilter(_is_ours)
    for handler in LOGGER.handlers:
        formatter = handler.formatter
        if isinstance(formatter, AccessFormatter) and formatter._fmt == USUAL:
            handler.setFormatter(_Formatter(FORMAT, DATE, use_colors=formatter.use_colors))
