"""Bounds of bodies, of the sequences of a request and of concurrent requests.

vLLM bounds the prompt and ``max_tokens`` by ``--max-model-len`` and logprobs by ``--max-logprobs``.
"""

import asyncio
import json
import re
from typing import Any

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnres_serve.server.bounds.guard import PROBES
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.server.refusal import refuse

BODY_SECONDS = 60  # for a body to arrive; meanwhile it counts as a running request
READING = ("GET", "HEAD", "OPTIONS")  # they start no work in the engine
ASKING = frozenset({"/v1/attn_res", "/v1/attn_res/statistics"})  # except these: they call workers
CODING = b"content-encoding"
# Matches every body with NaN, infinity or a number too large for a float.
UNBOUNDED = re.compile(rb"NaN|Infinity|[eE]\+?0*[1-9]\d\d|\d{300}")
GZIP = b"\x1f\x8b"  # the first bytes of a gzip body
LONGEST_NAME = 100  # characters of a client's field name in a message
# Fields with one entry per prompt: completions, batches of chats, items to score, questions.
BATCHES = ("prompt", "messages", "items", "questions")


class Limits:
    """ASGI middleware.  A request runs until the last byte of its response, or a disconnect."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self.app = app
        self.policy = policy
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _counts(scope):
            await self.app(scope, receive, send)
            return
        if self.running >= self.policy.max_concurrent_requests:
            message = (
                f"{self.running} requests are being answered, as many as this server takes at a "
                "time; try again in a second."
            )
            await refuse(429, message, retry_after="1")(scope, receive, send)
            return
        self.running += 1
        try:
            body = await self._body(scope, receive)
            self._check(scope, body)
        except HTTPException as error:
            response = refuse(error.status_code, error.detail, param=field_of(error.detail))
            await response(scope, receive, send)
        except ClientDisconnect:
            pass
        else:
            await self.app(scope, _again(body, receive), send)
        finally:
            self.running -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.  A declared length is used only to refuse a large body early.

        Raises:
            HTTPException: the body is too large or does not arrive.
            ClientDisconnect: the client disconnected.
        """
        limit = self.policy.max_body_bytes
        large = HTTPException(413, f"The body is larger than {limit} bytes; send a smaller one.")
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(length.isdigit() and int(length[:19]) > limit for length in lengths):
            raise large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise large
                    more = message.get("more_body", False)
        except TimeoutError:
            raise HTTPException(
                408, f"The body did not arrive within {BODY_SECONDS} seconds."
            ) from None
        return bytes(body)

    def _check(self, scope: Scope, body: bytes) -> None:
        try:
            content = json.loads(body)  # with the parser of the routes
            cut = cut_field(content) if may_be_cut(body) else None
        except json.JSONDecodeError:
            return  # the routes' message has the position
        except (
            ValueError,
            RecursionError,
        ) as error:  # the routes have no OpenAI-shaped error for it
            kinds = [value.lower() for name, value in scope["headers"] if name == b"content-type"]
            # Some routes parse bodies of other content types, too, and fail at deep nesting.
            if isinstance(error, RecursionError) or any(b"json" in kind for kind in kinds):
                coding = [value for name, value in scope["headers"] if name == CODING]
                raise HTTPException(400, unreadable(body, error, coding)) from None
            return
        if cut is not None:
            place = repr(cut[:LONGEST_NAME]) if cut else "The body"
            raise HTTPException(
                400,
                f"{place} has half of a surrogate pair; send a character such as an emoji whole, "
                "or leave it out.",
            )
        unbounded = unbounded_field(content) if UNBOUNDED.search(body) else None
        if unbounded is not None:
            place = repr(unbounded[:LONGEST_NAME]) if unbounded else "The body"
            raise HTTPException(
                400,
                f"{place} has NaN or an infinite number, which JSON has not; send finite ones.",
            )
        count, limit = sequences(content), self.policy.max_sequences
        if count > limit:
            raise HTTPException(
                400,
                f"This request asks for {count:g} sequences, prompts times answers; this server "
                f"takes at most {limit} at a time, so ask in several requests.",
            )


def unreadable(body: bytes, error: ValueError | RecursionError, coding: list[bytes]) -> str:
    """The message for a body that is no readable JSON for another reason than its syntax."""
    if body.startswith(GZIP) or coding:
        how = b", ".join(coding).decode("latin-1") or "gzip"
        return f"The body is compressed ({how}), which this server does not read; send it plain."
    if isinstance(error, RecursionError):
        what = "is nested too deep"
    elif isinstance(error, UnicodeDecodeError):
        what = "is not in UTF-8"
    else:
        what = "has too long a number"
    return f"The body is JSON that cannot be read: it {what}."


def field_of(sentence: str) -> str | None:
    """The field in quotation marks at the beginning of a message, or None."""
    match = re.match(r"'([^']+)' ", sentence)
    return match[1] if match else None


def _counts(scope: Scope) -> bool:
    """Whether a request counts as a concurrent request."""
    if scope["type"] != "http":
        return False
    path = get_route_path(scope)
    return path in ASKING or (scope["method"] not in READING and path not in PROBES)


def may_be_cut(body: bytes) -> bool:
    """Whether a text of a body may have half of a surrogate pair, from its bytes alone.

    A half is an escape, or its bytes in UTF-8; a body in UTF-16 or UTF-32 has zeros.
    """
    return any(sign in body for sign in (b"\\u", b"\xed", b"\0"))


def cut_field(content: Any) -> str | None:
    """The first field of a body with half of a surrogate pair in a text, or None.

    It is empty for the body itself, such as one with a half in a name.

    Raises:
        RecursionError: the body is nested too deep.
    """
    for name, value in content.items() if isinstance(content, dict) else [("", content)]:
        if is_cut(json.dumps([name, value], ensure_ascii=False)):
            return "" if is_cut(name) else name
    return None


def is_cut(text: str) -> bool:
    """Whether a text has half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def unbounded_field(content: Any) -> str | None:
    """The first field of a body with NaN or an infinite number, or None.

    It is empty for the body itself.
    """
    for name, value in content.items() if isinstance(content, dict) else [("", content)]:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return name
    return None


def sequences(content: Any) -> float:
    """The number of sequences of a body: prompts times ``n``.

    A body of another type counts as one sequence; the routes refuse it.
    """
    if not isinstance(content, dict):
        return 1
    prompts = max(_entries(content.get(name)) for name in BATCHES)
    nested = content.get("sampling_params")  # in /inference/v1/generate
    where = [content, nested] if isinstance(nested, dict) else [content]
    completions = max(_number(one.get("n")) for one in where)
    return prompts * completions


def _entries(value: Any) -> int:
    """The number of prompts in a field: a list of token ids or of messages is one prompt."""
    is_list = isinstance(value, list) and value and isinstance(value[0], str | list)
    return max(len(value), 1) if is_list or isinstance(value, dict) else 1


def _number(value: Any) -> float:
    """The number that vLLM will read; it accepts "3" and 3.0 for 3."""
    try:
        return max(1, float(value))  # in this order, so that NaN gives 1
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return 1


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns the body first and then the messages after it."""
    is_received = False

    async def receive_again() -> Message:
        nonlocal body, is_received
        if is_received:
            return await receive()
        message = {"type": "http.request", "body": body, "more_body": False}
        body, is_received = b"", True  # not kept while the response streams
        return message

    return receive_again
