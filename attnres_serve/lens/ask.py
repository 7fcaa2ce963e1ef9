"""Requests to a server's routes, such as ``POST /v1/attn_res/trace``."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import httpx
from safetensors import SafetensorError
from safetensors.numpy import load

from attnres_serve import address
from attnres_serve.errors import SettingError
from attnres_serve.lens.fit import require_fit
from attnres_serve.lens.vectors import Tensors
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.options import TraceOptions

TRACE = "/v1/attn_res/trace"
SERVERS = ("http://", "https://")
CONNECT = 10  # seconds to reach a server
Answer = TypeVar("Answer")


class Server(NamedTuple):
    """A running server.

    Attributes:
        url: its address.
        key: its API key; None for the variable OPENAI_API_KEY, if it is set.
        is_temporary: whether it was started for the request, so that users do not know its
            address.
    """

    url: str
    key: str | None = None
    is_temporary: bool = False


class ServerFailed(SettingError):
    """A server failed at a request that it did not refuse."""


def ask(
    server: Server, prompt: str | list[int], options: TraceOptions, tensors: Tensors | None = None
) -> TraceAnswer:
    """A trace from a server.

    Args:
        server: the server.
        prompt: text or token ids.
        options: what to trace.
        tensors: filled with the vectors, if the options request them.

    Raises:
        SettingError: there is no trace.
    """
    fields = options.model_dump(exclude_none=True, exclude_defaults=True)

    def read(content: bytes) -> TraceAnswer:
        if tensors is not None and options.vectors:
            tensors.update(load(content))
            content = tensors.pop("trace").tobytes()
        trace = TraceAnswer.model_validate_json(content)
        require_fit(trace, server.url)
        return trace

    return request(server, "POST", TRACE, {"prompt": prompt, **fields}, read)


def request(
    server: Server,
    method: str,
    path: str,
    body: Any = None,
    read: Callable[[bytes], Answer] = json.loads,
    client: Any = httpx,
) -> Answer:
    """What ``read`` returns for the response of a server.

    Args:
        server: the server.
        method, path, body: of the request.
        read: raises ValueError or KeyError for a response of another kind.
        client: an HTTPX client, which keeps its connection open.

    Raises:
        SettingError: the request failed.
    """
    url, key, is_temporary = server
    try:
        with address.past_proxies(url):
            response = client.request(
                method,
                f"{address.base_of(url)}{path}",
                json=body,
                headers=address.authorization(key),
                timeout=httpx.Timeout(None, connect=CONNECT),  # a trace may take long
            )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        if is_temporary:
            raise ServerFailed(f"the server ended while it was asked ({error}).") from None
        raise ServerFailed(f"the server {url} cannot be asked: {_unreached(url, error)}") from None
    if response.status_code == 401:
        advice = "give it in the variable OPENAI_API_KEY" if key is None else "`key` is another"
        raise SettingError(f"{url} wants an API key; {advice}.")
    try:
        if response.is_success:
            return read(response.content)
        reason = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError, SafetensorError):
        proxy = address.proxy_of(url)
        reason = "expected an answer of attnres-serve's route" + (
            f", and the proxy in the variable {proxy} was asked." if proxy else "."
        )
    if not is_temporary:
        what = path.rpartition("/")[2]
        reason = f"{url} gives no {what} (status {response.status_code}): {reason}"
    raise (ServerFailed if response.is_server_error else SettingError)(reason)


def _unreached(url: str, error: Exception) -> str:
    """Why there is no response and what to do, as the end of a sentence."""
    reason = str(error) or type(error).__name__
    if "://" not in url:
        return f"it has no scheme; expected for example http://127.0.0.1:8000, not {url!r}."
    proxy = address.proxy_of(url)
    if proxy is not None:
        return (
            f"the proxy in the variable {proxy} does not pass it on ({reason}); add "
            f"{address.host_of(url)} to the variable {address.NO_PROXY}, or correct {proxy}."
        )
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return (
            "this machine does not trust its certificate, as of one that is self-signed "
            f"({reason}); name the file of the certificate in the variable SSL_CERT_FILE."
        )
    if "SSL" in reason:
        return f"it does not answer by TLS ({reason}); give its address with http://."
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):  # TLS may reset as well
        return f"it does not answer by HTTP ({reason}); if it has a certificate, write https://."
    if "refused" in reason:
        return (
            f"no server listens there ({reason}); start one with `attnres-serve serve "
            "CHECKPOINT`, or give the address of one that runs."
        )
    return f"{reason}; give the address of a server that runs, for example http://127.0.0.1:8000."
