"""Access control: a key for every route except the probes and the page, and no foreign Host.

vLLM's key covers /v1 and a few prefixes, but not /invocations, /tokenize and other routes.  Here
the public routes are listed, and all others need a key.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address

from starlette._utils import get_route_path  # the path as the router sees it
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from attnres_serve.server.refusal import refuse

PROBES = frozenset({"/health", "/ready", "/ping"})
METRICS = "/metrics"
ROOT = "/"  # redirects to the page
PAGE = "/attn_res"  # the page and its files, which hold no data
MISSING = "This route needs an API key; send it as `Authorization: Bearer KEY`."
WRONG = "This is not an API key of this server; send one that is, as `Authorization: Bearer KEY`."


class Guard:
    """ASGI middleware, so that streams pass unchanged.

    Args:
        app: the guarded app.
        keys: the valid keys; without any, all routes are public.
        public_metrics: whether GET /metrics needs no key.
        local_only: whether Host has to be an address or localhost.  Another site could let its name
            resolve to this machine, and its scripts would then have this origin.
        closed: paths of closed routes, and the flag that would open each.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        public_metrics: bool,
        local_only: bool,
        closed: Mapping[str, str],
    ) -> None:
        self.app = app
        self.closed = closed
        self.digests = [sha256(key.encode()).digest() for key in keys]
        self.readable = {METRICS} if public_metrics else set()
        self.local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        if self.local_only and not all(
            is_local(value) for name, value in scope["headers"] if name == b"host"
        ):
            return refuse(
                400,
                "A server on a loopback address without an API key answers to localhost and to "
                "addresses only, and Host names something else; ask for 127.0.0.1 or set a key.",
            )
        if self.digests and not self._is_public(scope):
            key = _key_of(scope)
            if key is None or not self._is_one(key):
                return refuse(401, MISSING if key is None else WRONG, www_authenticate="Bearer")
        flag = self.closed.get(get_route_path(scope))
        if flag is not None:
            return refuse(404, f"This route is for servers that are started with {flag}.")
        return None

    def _is_public(self, scope: Scope) -> bool:
        path = get_route_path(scope)
        if path in self.readable or is_of_page(path):
            return scope.get("method") in ("GET", "HEAD")  # a body would take a slot (``limits``)
        return path in PROBES

    def _is_one(self, key: bytes) -> bool:
        digest_of_key = sha256(key).digest()
        # All digests are compared, so that the time does not depend on the key.
        return any([compare_digest(digest_of_key, digest) for digest in self.digests])


def _key_of(scope: Scope) -> bytes | None:
    """The key in a request's headers, or None."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key if key.strip() and scheme.lower() == b"bearer" else None
    return None


def is_of_page(path: str) -> bool:
    return path in (ROOT, PAGE) or path.startswith(f"{PAGE}/")


@lru_cache(maxsize=256)
def is_local(host: bytes) -> bool:
    """Whether a Host header is an address or localhost, which cannot resolve to something else."""
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
