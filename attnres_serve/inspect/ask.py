"""A trace to draw: from an engine in this process, or from a server that runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from attnres_serve import address, settings
from attnres_serve.compat import engine_config, engines, requests
from attnres_serve.depth.sites import Site
from attnres_serve.errors import SettingError
from attnres_serve.inspect import answer as trace_answer
from attnres_serve.inspect import edits
from attnres_serve.inspect.answer import Trace
from attnres_serve.inspect.edits import Resolved
from attnres_serve.inspect.fit import require_fit
from attnres_serve.inspect.prepare import Prepared
from attnres_serve.inspect.question import Question
from attnres_serve.inspect.readings import Lens, answered, readings

CONNECT = 10  # seconds to reach a server


def ask_engine(
    found: Prepared,
    flags: list[str],
    sites: list[Site],
    asked: Question,
    resolved: list[Resolved],
    bar: tqdm,
) -> Trace:
    """Start an engine, let it answer the prompt and trace both.

    Args:
        found: the checkpoint and the prompt.
        flags: further ones of vLLM's engine.
        sites: those that are traced, which mix.
        asked: what of the text; its ``sites`` are those above.
        resolved: its edits by numbers.
        bar: goes on by 2 + ``asked.max_tokens``.

    Raises:
        SettingError: vLLM refuses the flags, or there is no trace with them.
    """
    words = [*found.flags, "--max-num-seqs=1", *flags]
    given, texts = found.given, found.texts
    ids, longest = given, len(given) + asked.max_tokens
    with engine_of(words, bar) as engine:
        for field, top in (("logprobs", asked.logprobs), ("lens", asked.lens)):
            engine_config.require_few_logprobs(engine.vllm_config, field, top)
        bar.update()
        if asked.max_tokens:
            bar.set_description("generating")
            if resolved:
                answer = _continued(engine, given, asked.max_tokens, resolved, bar.update)
            else:
                answer = engines.generate_here(engine, given, asked.max_tokens, bar.update)
            bar.update(asked.max_tokens - len(answer))  # it may end early
            ids = given + answer
        bar.set_description("tracing")
        positions = [at for at in edits.positions(asked.tokens, longest) if at < len(ids)]
        wanted, after = [site.index for site in sites], trace_answer.following(ids, positions)
        predicted = None if asked.logprobs is None else (after, asked.logprobs)
        lens = None if asked.lens is None else Lens(readings(sites), after, asked.lens)
        own = _replay(engine, ids, positions, wanted, resolved, predicted, lens)
        plain = own
        if resolved and predicted:
            plain = _replay(engine, ids, positions, [], [], predicted)
        bar.update()
        name = engine.vllm_config.model_config.served_model_name

    def predictions(run: trace_answer.Found) -> list[dict[str, Any]]:
        return trace_answer.predictions(run.predicted or [], positions, after, texts)

    names = texts([ids[at] for at in positions])
    content = trace_answer.head(name, ids, len(given), positions, names)
    content["edits"] = asked.edits
    if predicted:
        content["logprobs"] = {
            "unedited": predictions(plain),
            "edited": predictions(own) if resolved else None,
        }
    if lens:
        content["lens"] = answered(sites, positions, lens, own.lens, texts)
    content["sites"] = [
        trace_answer.traced_site(site, *own.sites[site.index], len(positions)) for site in sites
    ]
    return Trace.model_validate(content)


@contextmanager
def engine_of(flags: list[str], bar: tqdm) -> Iterator[Any]:
    """An engine of which traces can be asked.

    Raises:
        SettingError: vLLM refuses the flags, or there is no trace with them.
    """
    bar.set_description("starting the engine")
    with engines.engine_here(flags) as engine:
        raise_first(engine.collective_rpc("attn_res_untraceable"))
        yield engine


def _replay(engine, *asked: Any) -> trace_answer.Found:
    found = trace_answer.merged(engine.collective_rpc("attn_res_trace", args=asked))
    raise_first([found.problem])
    return found


def _continued(
    engine, ids: list[int], max_tokens: int, resolved: list[Resolved], on_token: Callable
) -> list[int]:
    """Greedy continuation under edits, with a replay for each token."""
    stops, sequence = requests.stop_tokens(engine), list(ids)
    while len(sequence) < len(ids) + max_tokens:
        last = len(sequence) - 1
        found = _replay(engine, sequence, [last], [], resolved, ([trace_answer.NONE], 1))
        sequence.append(trace_answer.best(found))
        on_token()
        if sequence[-1] in stops:
            break
    return sequence[len(ids) :]


def raise_first(problems: list[str | None]) -> None:
    """Raise a SettingError with the first sentence of those that the workers answer."""
    for problem in problems:
        if problem is not None:
            raise SettingError(problem)


def ask_server(
    url: str, prompt: str | list[int], question: Question, bar: tqdm, key: str | None = None
) -> Trace:
    """Ask a server's ``POST /v1/attn_res/trace``.

    Args:
        url: of the server.
        prompt: text or token ids.
        question: what of it.
        bar: goes on by 1.
        key: of the server; None for the one in OPENAI_API_KEY, if there is one.

    Raises:
        SettingError: it gives no trace.
    """
    bar.set_description("asking the server")
    fields = question.model_dump(exclude_none=True, exclude_defaults=True)
    found = post(url, {"prompt": prompt, **fields}, key)
    bar.update()
    return found


def post(url: str, asked: dict[str, Any], key: str | None = None) -> Trace:
    """What a server's ``POST /v1/attn_res/trace`` answers; arguments as of ``ask_server``.

    Raises:
        SettingError: it gives no trace.
    """
    import httpx

    try:
        with address.past_proxies(url):
            answer = httpx.post(
                f"{address.base_of(url)}/v1/attn_res/trace",
                json=asked,
                headers=settings.authorization(key),
                timeout=httpx.Timeout(None, connect=CONNECT),  # a long answer takes its time
            )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SettingError(f"the server {url} cannot be asked: {_unreached(url, error)}") from None
    if answer.status_code == 401:
        advice = "give it in the variable OPENAI_API_KEY" if key is None else "`key` is another"
        raise SettingError(f"{url} wants an API key; {advice}.")
    try:
        if answer.is_success:
            found = Trace.model_validate_json(answer.content)
            require_fit(found, url)
            return found
        reason = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        proxy = address.proxy_of(url)
        reason = "expected an answer of attnres-serve's route" + (
            f", and the proxy in the variable {proxy} was asked." if proxy else "."
        )
    raise SettingError(f"{url} gives no trace (status {answer.status_code}): {reason}")


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
