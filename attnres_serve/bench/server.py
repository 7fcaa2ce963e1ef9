"""Asks at once if the server of ``attnres-serve bench --http`` can be measured.

vLLM's client takes many seconds to import and tells of every request that fails, so what is wrong
with the address, the key or the model's name is said before, in one sentence.
"""

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from itertools import takewhile
from math import inf
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from attnres_serve import settings
from attnres_serve.address import base_of, past_proxies
from attnres_serve.errors import SettingError

TIMEOUT = 10  # seconds for the list of models
KEY = "OPENAI_API_KEY"


class Served(NamedTuple):
    """What a server has.

    Attributes:
        model: the name of the model that is measured; vLLM's client would ask without a key.
        longest: tokens of its longest sequence; infinity where that is not said.
    """

    model: str
    longest: float


def check_there(url: str, model: str | None, flags: Sequence[str] = ()) -> Served:
    """Refuse a server that cannot be measured: its address, its key, or the model's name is wrong.

    Args:
        url: of the server.
        model: the model's name there; None for its first.
        flags: of vLLM's client, among which a --header may have the key.

    Raises:
        SettingError: with one sentence: what was found, what is expected, how to fix it.
    """
    url = address(url)
    headers = settings.authorization() | dict(_headers(flags))
    try:
        request = Request(f"{url}/v1/models", headers=headers)
        with past_proxies(url), urlopen(request, timeout=TIMEOUT) as answer:
            models = {entry["id"]: entry for entry in json.load(answer)["data"]}
            first = next(iter(models))
    except HTTPError as error:
        has_key = "authorization" in map(str.lower, headers)
        raise SettingError(_refused(url, error.code, has_key)) from None
    except OSError as error:
        raise SettingError(
            f"no server answers at {url} ({getattr(error, 'reason', error)}). Is it up? Start one "
            "with `attnres-serve serve CHECKPOINT`, or correct --http."
        ) from None
    except (HTTPException, ValueError, KeyError, TypeError, StopIteration):
        raise SettingError(
            f"{url}/v1/models does not answer with a list of models; expected an OpenAI-compatible "
            "server. Start one with `attnres-serve serve CHECKPOINT`, or correct --http."
        ) from None
    if model is not None and model not in models:
        raise SettingError(
            f"the server at {url} has no model {model}; it has {', '.join(models)}. "
            "Correct --model, or leave it out for the first."
        )
    name = model or first
    return Served(name, models[name].get("max_model_len") or inf)


def address(url: str) -> str:
    """The address of a server, without what is below it.

    Raises:
        SettingError: it is no address of HTTP.
    """
    expected = "expected http://HOST:PORT, for example http://127.0.0.1:8000."
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise SettingError(f"--http is {url}, which has no scheme; {expected}")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_whole = False
    if scheme.lower() not in ("http", "https") or not is_whole or " " in rest:
        raise SettingError(f"--http is {url}; {expected}")
    return base_of(url)


def _headers(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The headers that ``--header KEY=VALUE ...`` among the flags of vLLM's client adds."""
    for place, word in enumerate(flags):
        flag, equals, value = word.partition("=")
        if flag != "--header":
            continue
        behind = takewhile(lambda word: not word.startswith("-"), flags[place + 1 :])
        for header in [value] if equals else behind:
            name, _, content = header.partition("=")
            yield name, content


def _refused(url: str, status: int, has_key: bool) -> str:
    if status in (401, 403):
        if has_key:
            return f"the server at {url} refuses the key (status {status}); correct it in {KEY}."
        return (
            f"the server at {url} asks for a key (status {status}) and none is given; set the "
            f"variable {KEY}."
        )
    if status == 404:
        return (
            f"{url}/v1/models is not there (status 404); expected an OpenAI-compatible server. "
            "Give --http its address alone, for example http://127.0.0.1:8000."
        )
    return f"the server at {url} answers with status {status}; look into its log."
