"""What is asked about a text: the fields of a trace that a server, an engine and Python share."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from attnres_serve.depth.sites import Site
from attnres_serve.errors import SettingError
from attnres_serve.inspect.edits import MOST, Count, Edit, TokenRange


class Question(BaseModel):
    """What is traced of a text, and under which edits."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: Count = Field(0, description="greedy tokens that are generated and traced as well")
    sites: list[Count] | None = Field(None, description="indices; default: all that mix")
    tokens: list[Count] | TokenRange | None = Field(
        None, description="positions in prompt and answer; default: all"
    )
    edits: list[Edit] = Field(
        [], max_length=MOST, description="changes of what sites read, one after the other"
    )
    logprobs: Count | None = Field(
        None, description="how many of the most probable tokens are named behind every token"
    )
    lens: Count | None = Field(
        None,
        description="how many are named where each mix and each sum is read by the model's own "
        "last norm and head",
    )


def invalid(errors: Sequence[tuple[Sequence[int | str], str]]) -> str:
    """One sentence about the first field that is wrong.

    Args:
        errors: the places below the question and the messages of pydantic's errors.
    """
    first = _field(errors[0][0])
    said = [said.removeprefix("Value error, ") for place, said in errors if _field(place) == first]
    reasons = " or ".join(dict.fromkeys(said))
    return f"{first}: {reasons}." if first else f"{reasons[:1].upper()}{reasons[1:]}."


def _field(place: Sequence[int | str]) -> str:
    """The field that is meant, for example ``sites`` or ``edits[0].ban``."""
    field, *below = place or ("",)
    if field == "edits" and below:
        return f"edits[{below[0]}]" + "".join(f".{name}" for name in below[1:2])
    return str(field)


def chosen_sites(wanted: Sequence[int] | None, every: Sequence[Site]) -> list[Site]:
    """The sites that are asked for, ascending.

    Args:
        wanted: indices; None for all.
        every: the sites of the model that mix.

    Raises:
        SettingError: there is no such site.
    """
    if wanted is None:
        return list(every)
    known = {site.index: site for site in every}
    for index in wanted:
        if index not in known:
            raise SettingError(f"There is no site {index}; this model's are 0 to {max(known)}.")
    return [known[index] for index in sorted(set(wanted))]
