"""The float64 model with edits of its depth attention: the judge of edited traces.

Written from what each edit means for the exponentials of a site's logits, whose shares are the
weights; nothing of what applies edits is imported.  An edit is a dictionary as a request has it,
with all of `sites`, `sources` and `tokens`: indices, names and positions.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_serve.verify.oracle import Model
from attnres_serve.verify.oracle.norm import rms_norm
from attnres_serve.verify.oracle.spec import site_role

Edit = dict[str, Any]


def names(model: Model, site: int, count: int) -> list[str]:
    """The names of the `count` sources of a site."""
    found = ["embedding", *(f"block {number}" for number in range(1, count))]
    if model.spec.cumulative or site not in model.spec.starts:
        found[-1] = "partial"
    return found


def mixing_sites(model: Model) -> list[int]:
    return list(range(model.spec.final + model.spec.final_mix))


def sources_at(model: Model, site: int) -> list[str]:
    """The names of the sources that a site reads."""
    one = torch.zeros(1, model.spec.hidden, dtype=torch.float64)
    return names(model, site, len(model.sources(site, one, [one] * site)))


def exponentials(model: Model, site: int, sources: Tensor) -> Tensor:
    """Exponentials of the logits, [tokens, sources], of sources [sources, tokens, hidden]."""
    role, layer = site_role(model.spec, site)
    query = model.weight(f"{role}_query", layer).flatten()
    keys = rms_norm(sources, model.weight(f"{role}_key", layer), model.spec.key_norm_eps)
    logits = torch.einsum("ntd,d->tn", keys, query) * model.spec.logit_scale
    if model.spec.recency_bias:
        logits[:, -1] += model.weight(f"{role}_recency", layer).item()
    return logits.exp()


def apply(shares: Tensor, edit: Edit, chosen: Tensor) -> Tensor:
    """`shares` [tokens, sources] after an edit of the `chosen` sources; they need no sum."""
    if "mask" in edit:
        return shares * ~chosen
    if "scale" in edit:
        powers = torch.where(shares > 0, shares ** edit["scale"], 0.0)
        return torch.where(chosen, powers, shares)
    given = chosen.double()
    if "weights" in edit:
        given[chosen.nonzero()[:, 0]] = torch.tensor(edit["weights"], dtype=torch.float64)
    return given.expand(len(shares), -1)


def mix(
    model: Model, edits: Sequence[Edit], site: int, x: Tensor, y: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The same as `Model.mix` with edits, from the embedding x and the outputs y_0 ..."""
    h, weights = model.mix(site, x, y)
    if weights is None:
        return h, None
    sources = model.sources(site, x, y)
    own, shares = names(model, site, len(sources)), exponentials(model, site, sources)
    even = shares / shares.sum(-1, keepdim=True)
    torch.testing.assert_close(even, weights, equal_nan=True)
    for edit in edits:
        if site in edit["sites"]:
            chosen = torch.tensor([name in edit["sources"] for name in own])
            rows = edit["tokens"]
            shares[rows] = apply(shares[rows], in_order(edit, own), chosen)
    weights = shares / shares.sum(-1, keepdim=True)
    return torch.einsum("tn,ntd->td", weights, sources), weights


def evaluate(
    model: Model, ids: Sequence[int], edits: Sequence[Edit]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What the sites read, and what follows, all float64.

    Of every site that mixes the weights by which it is read and the RMS of its sources,
    [tokens, sources] each; and the logprobs [tokens, vocabulary].
    """
    x, y = model.embed(ids), []
    every, sizes = [], []
    for site in range(model.spec.final + 1):
        h, weights = mix(model, edits, site, x, y)
        if weights is not None:
            every.append(weights)
            sizes.append(model.sources(site, x, y).square().mean(-1).sqrt().T)
        if site < model.spec.final:
            y.append(model.sublayer(site, h))
    return every, sizes, model.head(h)


def in_order(edit: Edit, own: list[str]) -> Edit:
    """The edit with its weights in the order in which a site reads the sources."""
    if "weights" not in edit:
        return edit
    pairs = dict(zip(edit["sources"], edit["weights"], strict=True))
    return edit | {"weights": [pairs[name] for name in own if name in pairs]}


def greedy(model: Model, prompt: Sequence[int], edits: Sequence[Edit], n: int) -> list[int]:
    """`n` greedy tokens under edits; positions beyond the sequence wait for their token."""
    ids = list(prompt)
    for _ in range(n):
        now = [edit | {"tokens": [at for at in edit["tokens"] if at < len(ids)]} for edit in edits]
        ids.append(int(evaluate(model, ids, now)[2][-1].argmax()))
    return ids[len(prompt) :]


def some(model: Model, length: int) -> list[Edit]:
    """Edits of many sites, whose tokens are in several chunks.

    The embedding is masked at every second site, and some tokens read all sources evenly at every
    fourth.
    """
    sites = [site for site in mixing_sites(model) if len(sources_at(model, site)) > 1]
    part = list(range(length // 8, length - length // 3))
    even = [
        {"sites": [site], "sources": sources_at(model, site), "tokens": part, "mean": True}
        for site in sites[1::4]
    ]
    every = list(range(length))
    return [{"sites": sites[::2], "sources": ["embedding"], "tokens": every, "mask": True}, *even]


def drawn(model: Model, length: int) -> list[Edit]:
    """An edit of every kind, each of some sites, sources and tokens; a token may have several.

    None takes the last source of a site: a fifth of the draws would be refused.
    """
    edits = []
    for kind in ("scale", "mask", "mean", "weights", "force", "mask", "scale"):
        readers = [site for site in mixing_sites(model) if len(sources_at(model, site)) > 1]
        first = random.choice(readers)
        sources = random.sample(sources_at(model, first), random.randint(1, 2))
        if kind == "force":
            sources = sources[:1]
        able = [
            site
            for site in readers
            if set(sources) <= set(sources_at(model, site))
            and len(sources) < len(sources_at(model, site))
        ]
        if not able:
            continue
        sites = sorted(random.sample(able, random.randint(1, min(3, len(able)))))
        tokens = sorted(random.sample(range(length), random.randint(1, length)))
        value: Any = True
        if kind == "weights":
            value = [0.25, 0.75][: len(sources)] if len(sources) == 2 else [1.0]
        if kind == "scale":
            value = random.choice([-1.0, 0.0, 0.5, 2.0])
        edits.append({"sites": sites, "sources": sources, "tokens": tokens, kind: value})
    return edits


def static(model: Model, length: int) -> list[Edit]:
    """Drawn edits that hold for every token, after each of which every site has a source."""
    names = {name for site in mixing_sites(model) for name in sources_at(model, site)}
    while True:
        edits = [edit | {"tokens": list(range(length))} for edit in drawn(model, length)]
        edits = [edit | {"sources": [*names]} if "scale" in edit else edit for edit in edits]
        if all(leave_a_source(model, site, edits) for site in mixing_sites(model)):
            return edits


def leave_a_source(model: Model, site: int, edits: Sequence[Edit]) -> bool:
    """Whether a site reads a source after each of the edits, which hold for every token."""
    own = sources_at(model, site)
    shares = torch.ones(1, len(own), dtype=torch.float64)
    for edit in edits:
        if site in edit["sites"]:
            chosen = torch.tensor([name in edit["sources"] for name in own])
            shares = apply(shares, in_order(edit, own), chosen)
            if not shares.any():
                return False
    return True


def of_a_model(edit: Edit) -> Edit:
    """An edit of `static` as a model takes it."""
    left_out = {"tokens"} | ({"sources"} if "scale" in edit else set())
    return {key: value for key, value in edit.items() if key not in left_out}


def possible(model: Model, length: int) -> list[Edit]:
    """Drawn edits that leave every site a source at every token."""
    while True:
        edits = drawn(model, length)
        every, *_ = evaluate(model, [3] * length, edits)
        if all(weights.isfinite().all() for weights in every):
            return edits


def by_numbers(model: Model, edit: Edit) -> list[Any]:
    """A mask or a mean of neighbouring tokens, in the form in which workers take it."""
    own = {site: sources_at(model, site) for site in edit["sites"]}
    columns = [[site, [own[site].index(name) for name in edit["sources"]]] for site in own]
    first, *_, last = edit["tokens"]
    return ["mask" if "mask" in edit else "mean", [[first, last + 1]], [], columns]
