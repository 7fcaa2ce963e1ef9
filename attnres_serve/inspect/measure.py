"""Importance maps of an engine in this process, or of a server that runs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.inspect import ask, importance
from attnres_serve.inspect.answer import Trace
from attnres_serve.inspect.importance import NOTHING, Ban, Importance, Measure

TOO_SHORT = "the text has one token; give a longer one, whose logprobs change."


def by_engine(flags: list[str], asked: Importance, path: Path) -> None:
    """Start an engine and measure what a file lacks, unless it is whole.

    Args:
        flags: of vLLM's engine.
        asked: a map without numbers.
        path: of the file.

    Raises:
        SettingError: the file is another one or cannot be written, vLLM refuses the flags, or
            there is no trace with them.
    """
    if len(asked.tokens) < 2:
        raise SettingError(TOO_SHORT)
    found = _begun(asked, path)
    if not importance.missing(found):
        return

    def measure(bans: list[Ban]) -> list[float]:
        workers = engine.collective_rpc("attn_res_importance", args=(found.tokens, bans))
        ask.raise_first([worker["problem"] for worker in workers])
        return next(worker["means"] for worker in workers if worker["means"] is not None)

    with _bar(found) as bar, ask.engine_of(flags, bar) as engine:
        copies = min(engine.collective_rpc("attn_res_copies", args=(len(found.tokens),)))
        _fill(found, measure, copies, path, bar)


def by_server(url: str, prompt: str, path: Path) -> None:
    """Ask a server for what a file lacks: an edited trace for every ban.

    Args:
        url: of the server.
        prompt: text.
        path: of the file.

    Raises:
        SettingError: the file is another one or cannot be written, or the server gives no trace.
    """
    text = ask.post(url, {"prompt": prompt, "sites": []})
    tokens = [token.id for token in text.tokens]
    if len(tokens) < 2:
        raise SettingError(TOO_SHORT)
    sites = ask.post(url, {"prompt": tokens, "tokens": [0]}).sites
    every = [importance.empty_site(site) for site in sites]
    found = _begun(importance.empty(text.model, [], tokens, every), path)
    measure = partial(_ask, url, found)
    importance.require_same(found, measure, path)
    with _bar(found) as bar:
        _fill(found, measure, 1, path, bar)


def _ask(url: str, found: Importance, bans: Sequence[Ban]) -> list[float]:
    names = {site.index: site.sources for site in found.sites}
    means = []
    for ban in bans:
        asked: dict[str, Any] = {"prompt": found.tokens, "sites": [], "logprobs": 0}
        if ban != NOTHING:
            index, column = ban
            asked["edits"] = [{"sites": [index], "sources": [names[index][column]], "ban": True}]
        means.append(_mean(ask.post(url, asked)))
    return means


def _mean(trace: Trace) -> float:
    assert trace.logprobs is not None, "they were asked for"
    run = trace.logprobs.edited or trace.logprobs.unedited
    own = [prediction.next for prediction in run if prediction.next is not None]
    return sum(own) / len(own)


def _begun(asked: Importance, path: Path) -> Importance:
    """What a file has of a map; now it can be written, which is known before it takes time."""
    found = importance.read(path, asked)
    importance.write(found, path)
    return found


def _bar(found: Importance) -> tqdm:
    whole = sum(len(site.sources) for site in found.sites if len(site.sources) > 1)
    return output.bar(total=whole, initial=whole - len(importance.missing(found)), unit="ban")


def _fill(found: Importance, measure: Measure, batch: int, path: Path, bar: tqdm) -> None:
    bar.set_description("measuring")
    for done in importance.fill(found, measure, batch, path):
        bar.update(done)
