"""The options of a trace, shared by the server's route, the command and Python."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from attnres_serve.depth.edits import MOST, Count, Edit, TokenRange
from attnres_serve.depth.sites import Site
from attnres_serve.errors import SettingError


class TraceOptions(BaseModel):
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
    vectors: bool = Field(False, description="whether the answer is a safetensors file of vectors")


def requested_sites(indices: Sequence[int] | None, every: Sequence[Site]) -> list[Site]:
    """The requested sites, ascending.

    Args:
        indices: the requested indices; None for all.
        every: the sites of the model that mix.

    Raises:
        SettingError: there is no such site.
    """
    if indices is None:
        return list(every)
    known = {site.index: site for site in every}
    for index in indices:
        if index not in known:
            raise SettingError(f"There is no site {index}; this model's are 0 to {max(known)}.")
    return [known[index] for index in sorted(set(indices))]
