"""The address of a server that is asked over HTTP, and the way there."""

import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

# What `serve` prints below the address: of the API, of the page, of a trace.
_BELOW = re.compile(r"(?<=[^/:])(/v1)?(/attn_res(/trace)?)?/*$")
NO_PROXY = "no_proxy"  # hosts that are asked directly


def base_of(url: str) -> str:
    """The address of a server, of which the one of its API or its page may be given."""
    return _BELOW.sub("", re.split("[?#]", url, maxsplit=1)[0])


def host_of(url: str) -> str:
    """The host that an address names; empty for what is no address."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_local(url: str) -> bool:
    """Whether a server is asked by the loopback of this machine, which no proxy reaches."""
    host = host_of(url)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@contextmanager
def past_proxies(url: str) -> Iterator[None]:
    """Let a server on this machine be asked directly, whatever proxy the environment names."""
    if not is_local(url):
        yield
        return
    given = os.environ.get(NO_PROXY)
    others = os.environ.get(NO_PROXY.upper(), "") if given is None else given
    os.environ[NO_PROXY] = ",".join(filter(None, (others, host_of(url))))
    try:
        yield
    finally:
        if given is None:
            del os.environ[NO_PROXY]
        else:
            os.environ[NO_PROXY] = given


def authorization(key: str | None = None) -> dict[str, str]:
    """The header with an API key; empty without a key.

    Args:
        key: None for the variable OPENAI_API_KEY, which OpenAI's clients use too.
    """
    key = key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def proxy_of(url: str) -> str | None:
    """The variable with the proxy by which a server is asked; None if it is asked directly."""
    from urllib.request import getproxies, proxy_bypass  # imports HTTP and TLS

    scheme, host = url.partition("://")[0].lower(), host_of(url)
    if is_local(url) or not host or proxy_bypass(host):
        return None
    proxies = getproxies()
    return next((f"{name}_proxy" for name in (scheme, "all") if name in proxies), None)
