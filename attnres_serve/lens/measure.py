"""Importance maps, of which a server is asked for every number."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, importance
from attnres_serve.lens.ask import Server


def write_map(server: Server, prompt: str, path: Path) -> None:
    """Ask a server for a map: an edited trace for every ban, after which the file is written.

    Args:
        server: the server.
        prompt: text.
        path: of the file.

    Raises:
        SettingError: the file cannot be written, or the server gives no trace.
    """
    text = ask.post(server, {"prompt": prompt, "sites": []})
    tokens = [token.id for token in text.tokens]
    if len(tokens) < 2:
        raise SettingError("the text has one token; give a longer one, whose logprobs change.")
    sites = ask.post(server, {"prompt": tokens, "tokens": [0]}).sites
    unedited = _mean_logprob(server, tokens)
    found = importance.empty(text.model, tokens, unedited, sites)
    importance.write(found, path)  # so that it is known to be possible before it takes time
    several = [site for site in found.sites if len(site.sources) > 1]
    bans = [(site, column) for site in several for column in range(len(site.sources))]
    with output.bar(iterable=bans, unit="ban", desc="measuring") as bar:
        for site, column in bar:
            ban = {"sites": [site.index], "sources": [site.sources[column]], "ban": True}
            site.change[column] = _mean_logprob(server, tokens, edits=[ban]) - unedited
            importance.write(found, path)


def _mean_logprob(server: Server, tokens: Sequence[int], **edits: Any) -> float:
    trace = ask.post(server, {"prompt": tokens, "sites": [], "logprobs": 0, **edits})
    assert trace.logprobs is not None, "they were asked for"
    run = trace.logprobs.edited or trace.logprobs.unedited
    own = [prediction.next for prediction in run if prediction.next is not None]
    return sum(own) / len(own)
