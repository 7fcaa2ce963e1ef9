"""Addresses of servers over HTTP, and proxies on the way."""

import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

# Paths that `serve` prints: of the API, of the page, of a trace.
_BELOW = re.compile(r"(?<=[^/:])(/v1)?(/attn_res(/trace)?)?/*$")
NO_PROXY = "no_proxy"  # hosts to reach without a proxy


def base_of(url: str) -> str:
    """The address of a server, from that of its API or its page."""
    return _BELOW.sub("", re.split("[?#]", url, maxsplit=1)[0])


def host_of(url: str) -> str:
    """The host of an address; empty for invalid ones."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_local(url: str) -> bool:
    """Whether an address is on the loopback interface, which no proxy reaches."""
    host = host_of(url)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@contextmanager
def past_proxies(url: str) -> Iterator[None]:
    """Reach a server on this machine directly, ignoring proxies in the environment."""
    if not is_local(url):
        yield
        return
    before = os.environ.get(NO_PROXY)
    others = os.environ.get(NO_PROXY.upper(), "") if before is None else before
    os.environ[NO_PROXY] = ",".join(filter(None, (others, host_of(url))))
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_PROXY]
        else:
            os.environ[NO_PROXY] = before


def authorization(key: str | None = None) -> dict[str, str]:
    """The header with an API key; empty without a key.

    Args:
        key: None for the variable OPENAI_API_KEY, which OpenAI's clients use too.
    """
    key = key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def proxy_of(url: str) -> str | None:
    """The variable with the proxy for an address; None if it is reached directly."""
    from urllib.request import getproxies, proxy_bypass  # imports HTTP and TLS

    scheme, host = url.partition("://")[0].lower(), host_of(url)
    if is_local(url) or not host or proxy_bypass(host):
        return None
    proxies = getproxies()
    return next((f"{name}_proxy" for name in (scheme, "all") if name in proxies), None)
