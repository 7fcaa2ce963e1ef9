"""Importance maps, of which a server is asked for every number."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, importance
from attnres_serve.lens.ask import Server

# Nats between two mean logprobs of one text and model: float32 in another order of sums.
SAME = 1e-4


def write_map(server: Server, prompt: str, flags: Sequence[str], path: Path) -> None:
    """Ask a server for what a file lacks of a map: an edited trace for every ban.

    The file is written after every ban.

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
    found = importance.read(path, importance.empty(text.model, flags, tokens, sites))
    importance.write(found, path)  # so that it is known to be possible before it takes time
    unedited = _mean_logprob(server, tokens)
    if found.logprob is None:
        found.logprob = unedited
        importance.write(found, path)
    # A server tells no more of its weights than a name.
    if not abs(unedited - found.logprob) <= SAME:
        raise SettingError(
            f"--importance: {path} was begun with other weights: the text's mean logprob was "
            f"{found.logprob:.6f} and is {unedited:.6f}; name a new file."
        )
    whole = sum(len(site.sources) for site in found.sites if len(site.sources) > 1)
    bans = importance.missing(found)
    with output.bar(total=whole, initial=whole - len(bans), unit="ban", desc="measuring") as bar:
        for site, column in bans:
            ban = {"sites": [site.index], "sources": [site.sources[column]], "ban": True}
            site.change[column] = _mean_logprob(server, tokens, edits=[ban]) - found.logprob
            importance.write(found, path)
            bar.update()


def _mean_logprob(server: Server, tokens: Sequence[int], **edits: Any) -> float:
    trace = ask.post(server, {"prompt": tokens, "sites": [], "logprobs": 0, **edits})
    assert trace.logprobs is not None, "they were asked for"
    run = trace.logprobs.edited or trace.logprobs.unedited
    own = [prediction.next for prediction in run if prediction.next is not None]
    return sum(own) / len(own)
