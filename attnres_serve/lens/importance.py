"""How much a text's mean logprob changes when one site cannot read one source.

A map has a number for every source of every site that mixes; a site with one source has null, for
it cannot do without.  A server is asked for every number, and the file is written after each.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask
from attnres_serve.lens.ask import Server
from attnres_serve.tracing.answer import ReadingSite


class SiteImportance(ReadingSite):
    """One site."""

    change: list[float | None] = Field(
        description="of the mean logprob, if the source is masked; null: not possible, or not yet"
    )


class Importance(BaseModel):
    """The file."""

    model: str
    tokens: list[int]
    logprob: float = Field(description="mean over the tokens but the first")
    sites: list[SiteImportance]


def write_map(server: Server, prompt: str, path: Path) -> None:
    """Ask a server for a map: an edited trace for every mask, after which the file is written.

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
    traced = ask.post(server, {"prompt": tokens, "tokens": [0]}).sites
    unedited = _mean_logprob(server, tokens)
    sites = [
        SiteImportance.model_validate(site.model_dump() | {"change": [None] * len(site.sources)})
        for site in traced
    ]
    found = Importance(model=text.model, tokens=tokens, logprob=unedited, sites=sites)
    _write(found, path)  # so that it is known to be possible before it takes time
    several = [site for site in found.sites if len(site.sources) > 1]
    masks = [(site, column) for site in several for column in range(len(site.sources))]
    with output.bar(iterable=masks, unit="mask", desc="measuring") as bar:
        for site, column in bar:
            mask = {"sites": [site.index], "sources": [site.sources[column]], "mask": True}
            site.change[column] = _mean_logprob(server, tokens, edits=[mask]) - unedited
            _write(found, path)


def _mean_logprob(server: Server, tokens: Sequence[int], **edits: Any) -> float:
    trace = ask.post(server, {"prompt": tokens, "sites": [], "logprobs": 0, **edits})
    assert trace.logprobs is not None, "they were asked for"
    run = trace.logprobs.edited or trace.logprobs.unedited
    own = [prediction.next for prediction in run if prediction.next is not None]
    return sum(own) / len(own)


def _write(found: Importance, path: Path) -> None:
    """Write a map, whole or not at all.

    Raises:
        SettingError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(found.model_dump()) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise SettingError(f"--importance: {path} cannot be written ({error}).") from None
