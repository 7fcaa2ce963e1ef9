"""A trace, asked of a server by its ``POST /v1/attn_res/trace``."""

from typing import Any, NamedTuple

from attnres_serve import address, settings
from attnres_serve.errors import SettingError
from attnres_serve.lens.fit import require_fit
from attnres_serve.lens.vectors import Tensors
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.question import Question

TRACE = "/v1/attn_res/trace"
SERVERS = ("http://", "https://")
CONNECT = 10  # seconds to reach a server


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        url: its address.
        key: None for the one in OPENAI_API_KEY, if there is one.
        is_own: whether it was started for the question, so that nobody knows its address.
    """

    url: str
    key: str | None = None
    is_own: bool = False


class ServerFailed(SettingError):
    """A server failed at a question that it did not refuse."""


def ask(
    server: Server, prompt: str | list[int], question: Question, tensors: Tensors | None = None
) -> TraceAnswer:
    """The trace that a server gives.

    Args:
        server: the server.
        prompt: text or token ids.
        question: what of it.
        tensors: takes the vectors, if they are asked for.

    Raises:
        SettingError: it gives no trace.
    """
    fields = question.model_dump(exclude_none=True, exclude_defaults=True)
    found: TraceAnswer = post(server, {"prompt": prompt, **fields}, tensors)
    return found


def post(
    server: Server, asked: Any, tensors: Tensors | None = None, path: str = TRACE, call: Any = None
) -> Any:
    """What a server answers to a body by HTTPX's ``call``: a trace, or the JSON of another path.

    Raises:
        SettingError: it does not answer.
    """
    import httpx
    from safetensors import SafetensorError
    from safetensors.numpy import load

    url, key, is_own = server
    try:
        with address.past_proxies(url):
            answer = (call or httpx.post)(
                f"{address.base_of(url)}{path}",
                json=asked,
                headers=settings.authorization(key),
                timeout=httpx.Timeout(None, connect=CONNECT),  # a long answer takes its time
            )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        if is_own:
            raise ServerFailed(f"the server ended while it was asked ({error}).") from None
        raise ServerFailed(f"the server {url} cannot be asked: {_unreached(url, error)}") from None
    if answer.status_code == 401:
        advice = "give it in the variable OPENAI_API_KEY" if key is None else "`key` is another"
        raise SettingError(f"{url} wants an API key; {advice}.")
    try:
        if answer.is_success and path != TRACE:
            return answer.json()
        if answer.is_success:
            content = answer.content
            if tensors is not None and asked.get("vectors"):
                tensors |= load(content)
                content = tensors.pop("trace").tobytes()
            found = TraceAnswer.model_validate_json(content)
            require_fit(found, url)
            return found
        reason = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError, SafetensorError):
        proxy = address.proxy_of(url)
        reason = "expected an answer of attnres-serve's route" + (
            f", and the proxy in the variable {proxy} was asked." if proxy else "."
        )
    kind = ServerFailed if answer.is_server_error else SettingError
    raise kind(
        reason
        if is_own
        else f"{url} gives no {path.split('/')[-1]} (status {answer.status_code}): {reason}"
    )


def _unreached(url: str, error: Exception) -> str:
    """Why there is no answer and what to do, as the end of a sentence."""
    from httpx import ReadError, RemoteProtocolError

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
    if isinstance(error, RemoteProtocolError | ReadError):  # a server of TLS may reset as well
        return f"it does not answer by HTTP ({reason}); if it has a certificate, write https://."
    if "refused" in reason:
        return (
            f"no server listens there ({reason}); start one with `attnres-serve serve "
            "CHECKPOINT`, or give the address of one that runs."
        )
    return f"{reason}; give the address of a server that runs, for example http://127.0.0.1:8000."
