"""Edits of every token: another query of a site, and a bias for each source.

An edit acts on the logits of a site's sources.  If it acts alike at every token, each logit becomes
``factor * logit + bias[source]``: the factor can be multiplied into the site's query and its
learned bias.
"""

from collections.abc import Sequence
from math import log
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from attnres_serve import mistakes
from attnres_serve.depth import resolved_edits
from attnres_serve.depth.edits import MOST, Edit
from attnres_serve.depth.resolved_edits import Resolved
from attnres_serve.depth.sites import Site, sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.kernels.interface import MASKED

# Of a site's factors together; logits of 100 times it are far from the ends of float32.
MOST_FACTOR = 1e6


class SiteEdit(NamedTuple):
    """What edits make of a site's logits: ``factor * logit + bias[source]``.

    Attributes:
        factor: of the logits, the learned bias among them; 0 where edits give the weights.
        bias: one number for each source, in the order of ``Site.sources``; ``MASKED`` for a source
            that is not read.
        gives: whether the bias alone gives the weights, even to a source that the model's bias
            masks; otherwise such a source stays masked.
    """

    factor: float
    bias: tuple[float, ...]
    gives: bool = False


def of_sites(
    edits: Sequence[Edit], spec: AttnResSpec | None
) -> list[tuple[str, Site, Resolved, list[int]]]:
    """Edits of every token, in order, at each of their sites: name, site, edit and source numbers.

    Args:
        edits: in the order in which they are applied.
        spec: depth attention of the model; None for standard residuals.

    Raises:
        SettingError: the model has no depth attention, or an edit is impossible, names tokens,
            scales some of a site's sources, or leaves a site no source; the sentence names it.
    """
    if spec is None:
        raise SettingError("the model has standard residuals, so there is nothing to edit.")
    for at, edit in enumerate(edits):
        if edit.tokens is not None:
            raise SettingError(
                f"edits[{at}].tokens: an edit of a model holds for every token; leave the tokens "
                "out, or ask for a trace with this edit."
            )
    all_sites = sites(spec)
    edits_of_sites = [
        (f"edits[{at}]", all_sites[index], one, columns)
        for at, one in enumerate(resolved_edits.resolve(edits, all_sites, length=1))
        for index, columns in one.sites
    ]
    for name, site, one, columns in edits_of_sites:
        if one.kind == "scale" and len(columns) < site.num_sources:
            raise SettingError(
                f"{name} scales {len(columns)} of the {site.num_sources} sources of site "
                f"{site.index} ({site.name}), and an edit of a model scales all of them; leave "
                "`sources` out, or ask for a trace with this edit."
            )
    return edits_of_sites


def resolve(edits: Sequence[Edit], spec: AttnResSpec | None) -> dict[int, SiteEdit]:
    """What edits make of the sites that they change, by the sites' indices.

    Raises:
        SettingError: as ``of_sites``, or factors are too large.
    """
    site_edits: dict[int, SiteEdit] = {}
    for name, site, one, columns in of_sites(edits, spec):
        before = site_edits.get(site.index, SiteEdit(1.0, (0.0,) * site.num_sources))
        after = site_edits[site.index] = _edited(before, one, columns)
        unmasked = (number for number in after.bias if number != MASKED)
        if max(abs(after.factor), *(abs(number) / 100 for number in unmasked)) > MOST_FACTOR:
            raise SettingError(
                f"{name} scales site {site.index} ({site.name}) by more than {MOST_FACTOR:.0f} "
                "together with the edits before it; give smaller factors."
            )
    return site_edits


def _edited(before: SiteEdit, edit: Resolved, columns: list[int]) -> SiteEdit:
    if edit.kind == "scale":
        factor = edit.values[0]
        scaled = (MASKED if one == MASKED else one * factor for one in before.bias)
        return SiteEdit(before.factor * factor, tuple(scaled), before.gives)
    if edit.kind == "mask":
        masked = (MASKED if at in columns else one for at, one in enumerate(before.bias))
        return before._replace(bias=tuple(masked))
    shares = dict(zip(columns, edit.values or [1.0] * len(columns), strict=True))
    weights = (shares.get(at, 0.0) for at in range(len(before.bias)))
    return SiteEdit(0.0, tuple(log(share) if share else MASKED for share in weights), gives=True)


def from_json(content: Any, name: str) -> list[Edit]:
    """The edits of a list of objects that a sentence calls ``name``; SettingError if it is none."""
    try:
        edits = _LIST.validate_python(content)
    except ValidationError as error:
        mistake = mistakes.first(error.errors(), content)
        raise SettingError(f"{name}{mistake.field}{mistake.reason}.") from None
    if len(edits) > MOST:
        raise SettingError(f"{name} has {len(edits)} edits; expected at most {MOST}.")
    return edits


def to_json(edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """What ``from_json`` reads, without the fields that are None."""
    return [edit.model_dump(exclude_none=True) for edit in edits]


_LIST = TypeAdapter(list[Edit])
