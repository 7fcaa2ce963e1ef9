"""Edits by numbers of sites and sources, resolved against the sites of a model."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attnres_serve import sentences
from attnres_serve.depth import replacing
from attnres_serve.depth.edits import Edit, positions_of
from attnres_serve.depth.layout import FINAL
from attnres_serve.depth.sites import Site
from attnres_serve.errors import SettingError

MOST_TOKENS = 64  # of an answer under edits, each of which is a replay
# Tokens x sites that the edits of a request change together: this many always, and as many as eight
# edits of the whole sequence.
CHANGES = 2**18
WHOLE = 8
EACH = ("mask", "scale", "replace")  # what they do to a source needs no other source
SUM_IS_ONE = 1e-4  # weights of a trace have six digits, and there may be a hundred of them


class Resolved(NamedTuple):
    """An edit by numbers, in a form that goes to workers.

    Attributes:
        kind: one of ``KINDS``.
        runs: ascending ``[begin, end)`` of the tokens' positions.
        values: the weights, in the order of a site's sources below; the scale alone; or nothing.
        sites: of each the index, and the numbers of its sources.
        vectors: of ``replace`` the bytes of ``[1, d]`` or ``[tokens, d]`` float32.
    """

    kind: str
    runs: list[tuple[int, int]]
    values: list[float]
    sites: list[tuple[int, list[int]]]
    vectors: bytes = b""


def require_few_tokens(max_tokens: int, field: str, edits: str) -> None:
    """Refuse a long answer under edits.

    Args:
        max_tokens: how long the answer may be.
        field: what says so, with which the sentence begins.
        edits: what gives the edits, as the sentence calls it.

    Raises:
        SettingError: it is too long.
    """
    if max_tokens > MOST_TOKENS:
        raise SettingError(
            f"{field} is {max_tokens}; with {edits} expected at most {MOST_TOKENS}, because every "
            "token is a replay of its own."
        )


def resolve(
    edits: Sequence[Edit], sites: Sequence[Site], length: int, hidden: int | None = None
) -> list[Resolved]:
    """The edits by numbers.

    Args:
        edits: as a request has them.
        sites: those of the model, the final one even if it does not mix.
        length: the most tokens that the sequence may have.
        hidden: numbers of a vector; None where nothing can be replaced.

    Raises:
        SettingError: an edit is impossible; the sentence names it.
    """
    table = _Table(sites)
    resolved = [_resolve(edit, f"edits[{at}]", table, length) for at, edit in enumerate(edits)]
    for at, edit in enumerate(edits):
        if edit.replace is not None:
            tokens = sum(end - begin for begin, end in resolved[at].runs)
            vectors = replacing.vectors(edit.replace, f"edits[{at}].replace", tokens, hidden)
            resolved[at] = resolved[at]._replace(vectors=vectors)
    _require_few_changes(resolved, len(table.mixing), length)
    _require_a_source(resolved, table, length)
    return resolved


class _Table:
    """The sites of a model by what edits call them, and the numbers of their sources by name."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.mixing = [site for site in sites if site.mixes]
        self.named: dict[int | str, list[Site]] = defaultdict(list)
        for site in sites:
            for name in _names(site):
                self.named[name].append(site)
        self.numbers = {
            site.index: {name: number for number, name in enumerate(site.sources)}
            for site in self.mixing
        }
        self.sources = dict.fromkeys(name for each in self.numbers.values() for name in each)


def _resolve(edit: Edit, name: str, table: _Table, length: int) -> Resolved:
    # First, because the other checks need sites that exist.
    named = None if edit.sites is None else _sites(edit.sites, name, table)
    runs = _runs(positions_of(edit.tokens, length, f"{name}.tokens: "))
    if not runs:
        raise SettingError(f"{name}.tokens is empty; name a token, or leave it out for all.")
    sources = edit.sources
    if sources is not None and len(set(sources)) < len(sources):
        raise SettingError(f"{name}.sources names a source twice; name each once.")
    if sources == []:
        raise SettingError(f"{name}.sources is empty; name a source, or leave it out for all.")
    if edit.kind in ("force", "replace") and len(sources or ()) != 1:
        raise SettingError(
            f"{name}.{edit.kind} needs exactly one of the sources; name it in `sources`."
        )
    if edit.kind == "mask" and sources is None:
        raise SettingError(f"{name}.mask needs `sources`: no site can do without all of its own.")
    values = _values(edit, name)
    if named is None:
        for source in sources or ():
            if source not in table.sources:
                raise SettingError(
                    f"{name}.sources: no site of this model reads {source}; its sites read "
                    f"{sentences.some(table.sources)}."
                )
        chosen = _possible(edit, table)
        if not chosen:
            raise SettingError(f"{name}: no site of this model reads {_listed(sources)} so.")
    else:
        chosen = [(site, _columns(site, sources, name, table)) for site in named]
    for site, columns in chosen:
        if edit.weights is not None and len(columns) != len(values):
            raise SettingError(
                f"{name}.weights has {len(values)} numbers for {len(columns)} sources of site "
                f"{site.index}; give one for each."
            )
    return Resolved(edit.kind, runs, values, [(site.index, columns) for site, columns in chosen])


def _values(edit: Edit, name: str) -> list[float]:
    if edit.scale is not None:
        return [edit.scale]
    values = edit.weights or []
    if edit.weights is not None and abs(sum(values) - 1) > SUM_IS_ONE:
        raise SettingError(f"{name}.weights have the sum {sum(values):.6g}; expected 1.")
    return list(values)


def _possible(edit: Edit, table: _Table) -> list[tuple[Site, list[int]]]:
    """Sites at which an edit without sites is possible, with the numbers of its sources."""
    possible = []
    for site in table.mixing:
        names = table.numbers[site.index]
        named = names if edit.sources is None else edit.sources
        columns = [names[source] for source in named if source in names]
        whole = len(columns) == len(named)
        if edit.weights is not None:
            whole &= len(columns) == len(edit.weights)
        enough = len(columns) > 0 if edit.kind in EACH else whole
        if enough and not (edit.kind == "mask" and len(columns) == len(names)):
            possible.append((site, columns))
    return possible


def _sites(requested: Sequence[int | str], name: str, table: _Table) -> list[Site]:
    """The sites that an edit names, in their order."""
    if not requested:
        raise SettingError(f"{name}.sites is empty; name a site, or leave it out for all.")
    chosen: dict[int, Site] = {}
    for one in dict.fromkeys(requested):
        if one not in table.named:
            kinds = dict.fromkeys(site.kind for site in table.sites)
            raise SettingError(
                f"{name}.sites: there is no site {one}; this model's are 0 to "
                f"{table.sites[-1].index}, or of the kinds {', '.join(kinds)}."
            )
        chosen |= {site.index: site for site in table.named[one]}
    for index, site in chosen.items():
        if not site.mixes:
            raise SettingError(
                f"{name}.sites: site {index} ({site.name}) of this model mixes no sources, so it "
                "cannot be edited."
            )
    return [chosen[index] for index in sorted(chosen)]


def _names(site: Site) -> tuple[int | str, ...]:
    if site.kind == FINAL:
        return site.index, FINAL
    return site.index, site.kind, f"{site.kind} {site.layer}"


def _columns(site: Site, sources: list[str] | None, name: str, table: _Table) -> list[int]:
    names = table.numbers[site.index]
    for source in sources or ():
        if source not in names:
            raise SettingError(
                f"{name}.sources: site {site.index} ({site.name}) does not read {source}; it reads "
                f"{sentences.some(names)}."
            )
    return [names[source] for source in (names if sources is None else sources)]


def _listed(sources: list[str] | None) -> str:
    return "as many sources" if sources is None else ", ".join(sources)


def _runs(ascending: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for position in ascending:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return runs


def mask(runs: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Whether the positions from 0 to before ``length`` are in runs, ``[length]`` bool.

    Args:
        runs: ascending and apart from each other, of positions up to ``length``.
        length: of the mask.
    """
    begins, ends = np.asarray(runs, np.int64).T
    steps = np.zeros(length + 1, np.int8)
    steps[begins] += 1
    steps[ends] -= 1
    return steps[:-1].cumsum(dtype=np.int8).astype(bool)


def _require_few_changes(edits: list[Resolved], mixing: int, length: int) -> None:
    """Refuse edits that take far more work than the replay itself."""
    changes = sum(len(edit.sites) * sum(end - at for at, end in edit.runs) for edit in edits)
    limit = max(CHANGES, WHOLE * mixing * length)
    if changes > limit:
        raise SettingError(
            f"The edits change {changes} tokens x sites, counted for each edit; expected at most "
            f"{limit}, so choose some by `tokens` and `sites`, or give fewer edits."
        )


def _require_a_source(edits: list[Resolved], table: _Table, length: int) -> None:
    """Refuse edits that together leave a site without a source at some token."""
    if not edits:
        return
    masks = np.stack([mask(edit.runs, length) for edit in edits])
    # Tokens of the same edits are alike: the first of them stands for all.
    kinds = np.ascontiguousarray(np.packbits(masks, axis=0).T)
    tokens = np.sort(np.unique(kinds, axis=0, return_index=True)[1])
    masks = masks[:, tokens]
    by_site: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for at, edit in enumerate(edits):
        for index, columns in edit.sites:
            by_site[index].append((at, columns))
    for site in table.mixing:
        alive = np.ones((site.num_sources, len(tokens)), bool)
        for at, columns in by_site.get(site.index, ()):
            edit, chosen = edits[at], masks[at]
            if edit.kind == "mask":
                alive[columns] &= ~chosen
            elif edit.kind not in ("scale", "replace"):
                shares = edit.values or [1.0] * len(columns)
                kept = [column for column, share in zip(columns, shares, strict=True) if share > 0]
                alive &= ~chosen
                alive[kept] |= chosen
            none = ~alive.any(axis=0)
            if none.any():
                where = f" at token {tokens[none.argmax()]}" if length > 1 else ""
                raise SettingError(
                    f"edits[{at}] leaves site {site.index} ({site.name}) no source{where}; leave "
                    "at least one."
                )
