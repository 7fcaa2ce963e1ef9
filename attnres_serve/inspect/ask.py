"""A trace to draw: from an engine in this process, or from a server that runs."""

import os
from collections.abc import Callable

from tqdm import tqdm

from attnres_serve import settings
from attnres_serve.compat import engines
from attnres_serve.depth.sites import Site
from attnres_serve.errors import SettingError
from attnres_serve.inspect import answer as trace_answer
from attnres_serve.inspect.answer import Trace


def ask_engine(
    flags: list[str],
    sites: list[Site],
    given: list[int],
    max_tokens: int,
    decode: Callable[[list[int]], str],
    bar: tqdm,
) -> Trace:
    """Start an engine, let it answer the prompt and trace both.

    Args:
        flags: of vLLM's engine.
        sites: those of the model that mix.
        given: the prompt.
        max_tokens: how long its answer may be.
        decode: the text of token ids.
        bar: goes on by 2 + ``max_tokens``.

    Raises:
        SettingError: vLLM refuses the flags, or there is no trace with them.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the bar is what is to be read
    bar.set_description("starting the engine")
    ids = given
    with engines.engine_here(flags) as engine:
        _raise_first(engine.collective_rpc("attn_res_untraceable"))
        bar.update()
        if max_tokens:
            bar.set_description("generating")
            answer = engines.generate_here(engine, given, max_tokens, bar.update)
            bar.update(max_tokens - len(answer))  # it may end early
            ids = given + answer
        bar.set_description("tracing")
        wanted = [site.index for site in sites]
        asked = ids, list(range(len(ids))), wanted
        workers = engine.collective_rpc("attn_res_trace", args=asked)
        found = trace_answer.merged(workers)
        _raise_first([found.problem])
        bar.update()
        name = engine.vllm_config.model_config.served_model_name
    texts = [decode([token]) for token in ids]
    content = trace_answer.head(name, ids, len(given), range(len(ids)), texts)
    content["sites"] = [
        trace_answer.traced_site(site, *found.sites[site.index], len(ids)) for site in sites
    ]
    return Trace.model_validate(content)


def _raise_first(problems: list[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise SettingError(problem)


def ask_server(url: str, prompt: str, max_tokens: int, bar: tqdm) -> Trace:
    """Ask a server's ``POST /v1/attn_res/trace``, with the key in OPENAI_API_KEY if there is one.

    Args:
        url: of the server.
        prompt: text.
        max_tokens: how long its answer may be.
        bar: goes on by 1.

    Raises:
        SettingError: it gives no trace.
    """
    import httpx

    bar.set_description("asking the server")
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/v1/attn_res/trace",
            json={"prompt": prompt, "max_tokens": max_tokens},
            headers=settings.authorization(),
            timeout=None,  # a long answer takes its time
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SettingError(
            f"the server {url} cannot be asked ({error}); give the address of one that runs, for "
            "example http://127.0.0.1:8000."
        ) from None
    if answer.status_code == 401:
        raise SettingError(f"{url} wants an API key; give it in the variable OPENAI_API_KEY.")
    try:
        if answer.is_success:
            found = Trace.model_validate_json(answer.content)
            bar.update()
            return found
        reason = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = "expected an answer of attnres-serve's route."
    raise SettingError(f"{url} gives no trace (status {answer.status_code}): {reason}")
