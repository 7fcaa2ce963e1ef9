"""Importance maps, of which a server is asked for every number."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, importance
from attnres_serve.lens.ask import Server
from attnres_serve.lens.importance import NOTHING, Ban, Importance
from attnres_serve.tracing.answer import TraceAnswer


def write_map(server: Server, prompt: str, flags: Sequence[str], path: Path) -> None:
    """Ask a server for what a file lacks of a map: an edited trace for every ban.

    Args:
        server: the server.
        prompt: text.
        flags: by which the server was started for the map; empty for one that ran before.
        path: of the file.

    Raises:
        SettingError: the file is another one or cannot be written, or the server gives no trace.
    """
    text = ask.post(server, {"prompt": prompt, "sites": []})
    tokens = [token.id for token in text.tokens]
    if len(tokens) < 2:
        raise SettingError("the text has one token; give a longer one, whose logprobs change.")
    sites = ask.post(server, {"prompt": tokens, "tokens": [0]}).sites
    every = [importance.empty_site(site) for site in sites]
    found = _begun(importance.empty(text.model, flags, tokens, every), path)
    measure = partial(_ask, server, found)
    importance.require_same(found, measure, path)
    whole = sum(len(site.sources) for site in found.sites if len(site.sources) > 1)
    done = whole - len(importance.missing(found))
    with output.bar(total=whole, initial=done, unit="ban", desc="measuring") as bar:
        for _ in importance.fill(found, measure, path):
            bar.update()


def _ask(server: Server, found: Importance, ban: Ban) -> float:
    asked: dict[str, Any] = {"prompt": found.tokens, "sites": [], "logprobs": 0}
    if ban != NOTHING:
        index, column = ban
        (sources,) = (site.sources for site in found.sites if site.index == index)
        asked["edits"] = [{"sites": [index], "sources": [sources[column]], "ban": True}]
    return _mean(ask.post(server, asked))


def _mean(trace: TraceAnswer) -> float:
    assert trace.logprobs is not None, "they were asked for"
    run = trace.logprobs.edited or trace.logprobs.unedited
    own = [prediction.next for prediction in run if prediction.next is not None]
    return sum(own) / len(own)


def _begun(asked: Importance, path: Path) -> Importance:
    """What a file has of a map; now it can be written, which is known before it takes time."""
    found = importance.read(path, asked)
    importance.write(found, path)
    return found
