"""Bounds of bodies, of the sequences of a request and of requests at a time.

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

BODY_SECONDS = 60  # for a body to arrive; it holds its place among the requests meanwhile
READING = ("GET", "HEAD", "OPTIONS")  # they start nothing in the engine
ASKING = frozenset({"/v1/attn_res", "/v1/attn_res/statistics"})  # except these, which ask workers
CODING = b"content-encoding"
# What may stand in a body that has a number which is none, or too large for a float.
UNBOUNDED = re.compile(rb"NaN|Infinity|[eE]\+?0*[1-9]\d\d|\d{300}")
GZIP = b"\x1f\x8b"  # with which such a body begins
LONGEST_NAME = 100  # characters of a field in a sentence; it is the client's
# Fields with one entry per prompt: completions, chats of a batch, items to score, questions.
BATCHES = ("prompt", "messages", "items", "questions")


class Limits:
    """Pure ASGI.  A request counts to the last byte of its answer, or until its client leaves."""

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
            answer = refuse(error.status_code, error.detail, param=field_of(error.detail))
            await answer(scope, receive, send)
        except ClientDisconnect:
            pass
        else:
            await self.app(scope, _again(body, receive), send)
        finally:
            self.running -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body; what it declares to be is not believed, only refused if it is too much.

        Raises:
            HTTPException: it is too large or does not arrive.
            ClientDisconnect: the client went away.
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
            asked = json.loads(body)  # by the parser that the routes use
            cut = cut_field(asked) if may_be_cut(body) else None
        except json.JSONDecodeError:
            return  # the routes say where
        except (ValueError, RecursionError) as error:  # they would not, in OpenAI's shape
            kinds = [value.lower() for name, value in scope["headers"] if name == b"content-type"]
            # Some routes read what is not declared to be JSON, too, and fail at what is too deep.
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
        unbounded = unbounded_field(asked) if UNBOUNDED.search(body) else None
        if unbounded is not None:
            place = repr(unbounded[:LONGEST_NAME]) if unbounded else "The body"
            raise HTTPException(
                400,
                f"{place} has NaN or an infinite number, which JSON has not; send finite ones.",
            )
        count, limit = sequences(asked), self.policy.max_sequences
        if count > limit:
            raise HTTPException(
                400,
                f"This request asks for {count:g} sequences, prompts times answers; this server "
                f"takes at most {limit} at a time, so ask in several requests.",
            )


def unreadable(body: bytes, error: ValueError | RecursionError, coding: list[bytes]) -> str:
    """The sentence about a body that is no JSON for another reason than its syntax."""
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
    """The field that a sentence begins with in quotation marks; None if it begins otherwise."""
    found = re.match(r"'([^']+)' ", sentence)
    return found[1] if found else None


def _counts(scope: Scope) -> bool:
    """True if a request counts among the requests at a time."""
    if scope["type"] != "http":
        return False
    path = get_route_path(scope)
    return path in ASKING or (scope["method"] not in READING and path not in PROBES)


def may_be_cut(body: bytes) -> bool:
    """False if no text of a body can have half of a surrogate pair, told without reading it.

    A half is written as an escape, or as UTF-8 would write it; a body of UTF-16 or 32 has zeros.
    """
    return any(sign in body for sign in (b"\\u", b"\xed", b"\0"))


def cut_field(asked: Any) -> str | None:
    """The field of a body that has a text with half of a surrogate pair; None if there is none.

    Empty for the body itself, such as one with a name that is cut.

    Raises:
        RecursionError: the body is nested too deep.
    """
    for name, value in asked.items() if isinstance(asked, dict) else [("", asked)]:
        if is_cut(json.dumps([name, value], ensure_ascii=False)):
            return "" if is_cut(name) else name
    return None


def is_cut(text: str) -> bool:
    """Whether half of a surrogate pair is in a text, which then has no bytes in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def unbounded_field(asked: Any) -> str | None:
    """The field of a body that has NaN or an infinite number; None if there is none.

    Empty for the body itself.
    """
    for name, value in asked.items() if isinstance(asked, dict) else [("", asked)]:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return name
    return None


def sequences(asked: Any) -> float:
    """Number of sequences of a body: prompts times ``n``.

    A body of another kind counts as one sequence; the routes say what is wrong with it.
    """
    if not isinstance(asked, dict):
        return 1
    prompts = max(_entries(asked.get(name)) for name in BATCHES)
    nested = asked.get("sampling_params")  # of /inference/v1/generate
    where = [asked, nested] if isinstance(nested, dict) else [asked]
    answers = max(_number(one.get("n")) for one in where)
    return prompts * answers


def _entries(value: Any) -> int:
    """Prompts in a field: a list of token ids is one, and so is a list of messages."""
    is_list = isinstance(value, list) and value and isinstance(value[0], str | list)
    return max(len(value), 1) if is_list or isinstance(value, dict) else 1


def _number(value: Any) -> float:
    """The number that vLLM will read; it takes "3" and 3.0 for 3."""
    try:
        return max(1, float(value))  # and not the other way round: 1 for a NaN
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return 1


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body first and then what comes after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal body, given
        if given:
            return await receive()
        message = {"type": "http.request", "body": body, "more_body": False}
        body, given = b"", True  # not kept while the answer streams
        return message

    return receive_again
