"""How much a text's mean logprob changes when one site cannot read one source.

A map has a number for every source of every site that mixes; a site with one source has null, for
it cannot do without.  It is written after every ban.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from attnres_serve.errors import SettingError
from attnres_serve.tracing.answer import TracedSite


class SiteImportance(BaseModel):
    """One site."""

    index: int
    layer: int | None = Field(description="null for the final site")
    kind: str
    sources: list[str] = Field(description="embedding, block 1, ..., partial")
    change: list[float | None] = Field(
        description="of the mean logprob, if the source is banned; null: not possible, or not yet"
    )


class Importance(BaseModel):
    """The file."""

    model: str
    tokens: list[int]
    logprob: float = Field(description="mean over the tokens but the first")
    sites: list[SiteImportance]


def empty(
    model: str, tokens: Sequence[int], logprob: float, sites: Sequence[TracedSite]
) -> Importance:
    """A map without a ban."""
    return Importance(
        model=model,
        tokens=list(tokens),
        logprob=logprob,
        sites=[
            SiteImportance(
                index=site.index,
                layer=site.layer,
                kind=site.kind,
                sources=site.sources,
                change=[None] * len(site.sources),
            )
            for site in sites
        ],
    )


def write(found: Importance, path: Path) -> None:
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
