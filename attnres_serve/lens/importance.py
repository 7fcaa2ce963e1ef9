"""How much a text's mean logprob changes when one site cannot read one source.

A map has a number for every source of every site that mixes; a site with one source has null, for
it cannot do without.  It is written after every ban, and a file that is not whole is continued.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

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
    flags: list[str] = Field(
        description="of the server that was started, as given, behind those of --config"
    )
    tokens: list[int]
    logprob: float | None = Field(description="mean over the tokens but the first; null: not yet")
    sites: list[SiteImportance]


def empty(
    model: str, flags: Sequence[str], tokens: Sequence[int], sites: Sequence[TracedSite]
) -> Importance:
    """A map without numbers."""
    return Importance(
        model=model,
        flags=list(flags),
        tokens=list(tokens),
        logprob=None,
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


def read(path: Path, asked: Importance) -> Importance:
    """What a file has of the map that is asked for; ``asked`` itself if there is no file.

    Raises:
        SettingError: it holds something else, or cannot be read.
    """
    try:
        found = Importance.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return asked
    except OSError as error:
        raise SettingError(f"--importance: {path} cannot be read ({error}).") from None
    except ValidationError:
        raise SettingError(
            f"--importance: {path} is another file; name one that does not exist yet."
        ) from None
    for field in ("model", "flags", "tokens"):
        if getattr(found, field) != getattr(asked, field):
            what = "text" if field == "tokens" else field
            raise SettingError(
                f"--importance: {path} was begun with other {what}; name a new file, or ask "
                "for the same again."
            )
    shapes = [
        [(one.index, one.sources, len(one.change)) for one in x.sites] for x in (found, asked)
    ]
    if shapes[0] != shapes[1]:
        raise SettingError(
            f"--importance: {path} has other sites than this model; name a new file."
        )
    return found


def missing(found: Importance) -> list[tuple[SiteImportance, int]]:
    """The bans that a map still lacks: sites and the numbers of their sources."""
    return [
        (site, column)
        for site in found.sites
        if len(site.sources) > 1
        for column, change in enumerate(site.change)
        if change is None
    ]


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
