"""Edits of depth attention, as a request says them; ``resolved_edits`` has them by numbers.

An edit acts on the logits of a site's sources, before their softmax.  So edits of one site and
token are applied one after the other, in the order of the request.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from attnres_serve.errors import SettingError

Count = Annotated[int, Field(strict=True, ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# A logit of float32 times as many factors as a request has stays finite in float64.
Factor = Annotated[float, Field(ge=-1000, le=1000)]

MOST = 64  # edits of one request
KINDS = ("mask", "force", "weights", "mean", "scale", "replace")
OLD = "ban"  # the first name of ``mask``, which is read still


class TokenRange(BaseModel):
    """Positions from ``start`` up to, but not including, ``end``."""

    model_config = ConfigDict(extra="forbid")

    start: Count = 0
    end: Count | None = Field(None, description="default: the end of the sequence")


class Edit(BaseModel):
    """A change of what sites read, by exactly one of the last six fields."""

    model_config = ConfigDict(extra="forbid")

    sites: list[Count | str] | None = Field(
        None,
        description="indices; a kind (`mlp`), a kind and its layer (`mlp 3`), or `final`; default: "
        "all at which it is possible",
    )
    sources: list[str] | None = Field(
        None, description="as a trace names them: embedding, block 1, ..., partial; default: all"
    )
    tokens: list[Count] | TokenRange | None = Field(
        None, description="positions in prompt and answer; default: all"
    )
    mask: Literal[True] | None = Field(
        None,
        validation_alias=AliasChoices("mask", OLD),
        description="the sources have weight 0 (`ban` is read too)",
    )
    force: Literal[True] | None = Field(None, description="the one source has weight 1")
    weights: list[Share] | None = Field(
        None, description="the weight of each of the sources; any other one has 0"
    )
    mean: Literal[True] | None = Field(
        None, description="the sources have equal weights, any other one has 0"
    )
    scale: Factor | None = Field(None, description="factor of the logits of the sources")
    replace: str | None = Field(
        None,
        description="what is read in the place of the one source: base64 of float32, one vector "
        "for all of the tokens or one for each",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "Edit":
        if len(self._kinds()) != 1:
            raise ValueError(f"give exactly one of {', '.join(f'`{kind}`' for kind in KINDS)}")
        return self

    def _kinds(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return self._kinds()[0]


def positions_of(tokens: Any, length: int, name: str = "") -> list[int]:
    """The requested positions, ascending, in a sequence of the greatest length.

    Args:
        tokens: a list, a ``TokenRange``, or None for all.
        length: the most tokens that the sequence may have.
        name: what a sentence begins with.

    Raises:
        SettingError: a position is beyond the sequence, or the range is empty.
    """
    if isinstance(tokens, list):
        for position in tokens:
            if position >= length:
                there = "there" if name else "There"
                raise SettingError(
                    f"{name}{there} is no token {position}; the sequence has at most {length}."
                )
        return sorted(set(tokens))
    chosen = tokens or TokenRange(start=0, end=None)
    end = length if chosen.end is None else min(chosen.end, length)
    if chosen.start >= end:
        the = "the" if name else "The"
        raise SettingError(
            f"{name}{the} range of tokens is empty: from {chosen.start} to before {end}."
        )
    return list(range(chosen.start, end))
