"""A trace to draw: from an engine in this process, or from a server that runs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from attnres_serve import settings
from attnres_serve.compat import engines, requests
from attnres_serve.depth.sites import Site
from attnres_serve.errors import SettingError
from attnres_serve.inspect import answer as trace_answer
from attnres_serve.inspect.answer import Trace
from attnres_serve.inspect.edits import Edit, Resolved

TOP = 3  # most probable tokens that are named where there are edits


class Text(NamedTuple):
    """What is traced.

    Attributes:
        given: the prompt.
        max_tokens: how long its answer may be.
        decode: the text of token ids.
    """

    given: list[int]
    max_tokens: int
    decode: Callable[[list[int]], str]


def ask_engine(
    flags: list[str],
    sites: list[Site],
    text: Text,
    edits: list[Edit],
    resolved: list[Resolved],
    bar: tqdm,
) -> Trace:
    """Start an engine, let it answer the prompt and trace both.

    Args:
        flags: of vLLM's engine.
        sites: those of the model that mix.
        text: prompt and answer.
        edits: of what sites read, as they are asked for.
        resolved: the same by numbers.
        bar: goes on by 2 + ``text.max_tokens``.

    Raises:
        SettingError: vLLM refuses the flags, or there is no trace with them.
    """
    given, max_tokens, decode = text
    ids = given
    with engine_of(flags, bar) as engine:
        bar.update()
        if max_tokens:
            bar.set_description("generating")
            if resolved:
                answer = _continued(engine, given, max_tokens, resolved, bar.update)
            else:
                answer = engines.generate_here(engine, given, max_tokens, bar.update)
            bar.update(max_tokens - len(answer))  # it may end early
            ids = given + answer
        bar.set_description("tracing")
        every, wanted = list(range(len(ids))), [site.index for site in sites]
        after = trace_answer.following(ids, every)
        predicted = (after, TOP) if resolved else None
        found = _replay(engine, ids, every, wanted, resolved, predicted)
        plain = _replay(engine, ids, every, [], [], predicted) if resolved else None
        bar.update()
        name = engine.vllm_config.model_config.served_model_name
    texts = [decode([token]) for token in ids]
    content = trace_answer.head(name, ids, len(given), range(len(ids)), texts)
    content["edits"] = edits
    if plain is not None:
        content["logprobs"] = {
            name: trace_answer.predictions(
                run.predicted or [], every, after, lambda tokens: [decode([one]) for one in tokens]
            )
            for name, run in (("unedited", plain), ("edited", found))
        }
    content["sites"] = [
        trace_answer.traced_site(site, *found.sites[site.index], len(ids)) for site in sites
    ]
    return Trace.model_validate(content)


@contextmanager
def engine_of(flags: list[str], bar: tqdm) -> Iterator[Any]:
    """An engine of which traces can be asked.

    Raises:
        SettingError: vLLM refuses the flags, or there is no trace with them.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the bar is what is to be read
    bar.set_description("starting the engine")
    with engines.engine_here(flags) as engine:
        raise_first(engine.collective_rpc("attn_res_untraceable"))
        yield engine


def _replay(engine, *asked: Any) -> trace_answer.Found:
    found = trace_answer.merged(engine.collective_rpc("attn_res_trace", args=asked))
    raise_first([found.problem])
    return found


def _continued(
    engine, ids: list[int], max_tokens: int, edits: list[Resolved], on_token: Callable
) -> list[int]:
    """Greedy continuation under edits, with a replay for each token."""
    stops, sequence = requests.stop_tokens(engine), list(ids)
    while len(sequence) < len(ids) + max_tokens:
        last = len(sequence) - 1
        found = _replay(engine, sequence, [last], [], edits, ([trace_answer.NONE], 1))
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


def ask_server(url: str, prompt: str, max_tokens: int, edits: list[Edit], bar: tqdm) -> Trace:
    """Ask a server's ``POST /v1/attn_res/trace``, with the key in OPENAI_API_KEY if there is one.

    Args:
        url: of the server.
        prompt: text.
        max_tokens: how long its answer may be.
        edits: of what sites read.
        bar: goes on by 1.

    Raises:
        SettingError: it gives no trace.
    """
    bar.set_description("asking the server")
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens}
    if edits:
        asked |= {"edits": [edit.model_dump(exclude_none=True) for edit in edits], "logprobs": TOP}
    found = post(url, asked)
    bar.update()
    return found


def post(url: str, asked: dict[str, Any]) -> Trace:
    """What a server's ``POST /v1/attn_res/trace`` answers.

    Raises:
        SettingError: it gives no trace.
    """
    import httpx

    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/v1/attn_res/trace",
            json=asked,
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
            return Trace.model_validate_json(answer.content)
        reason = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = "expected an answer of attnres-serve's route."
    raise SettingError(f"{url} gives no trace (status {answer.status_code}): {reason}")
