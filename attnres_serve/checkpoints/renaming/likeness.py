"""Tensor names as sets of words, to compare the names of different codes."""

import re
from collections.abc import Collection, Mapping, Sequence

from attnres_serve.depth.layout import Layout
from attnres_serve.families.family import EMBEDDINGS, HEAD, Shape

Words = frozenset[str]

# Phrases of several words, and one word for several.
_PHRASES = [
    (re.compile(pattern), f" {replacement} ")
    for pattern, replacement in (
        (r"attn_?res(iduals?)?(?![a-z])|attention_residuals?|depth_att(n|ention)", "res"),
        (r"post_att(n|ention)", "postattn"),
        (r"post_(feed_?forward|mlp|ffn?)", "postmlp"),
        (r"feed_?forward", "mlp"),
        (r"(layer|rms)_?norm", "norm"),
        (r"embed_out|lm_head|unembed(ding)?", "head"),
        (r"qkv|q_k_v", "q k v"),
    )
]
_SYNONYMS = {
    **dict.fromkeys(("attention", "att", "mha"), "attn"),
    **dict.fromkeys(("ffn", "ff", "moe"), "mlp"),
    **dict.fromkeys(("wq", "query", "queries"), "q"),
    **dict.fromkeys(("wk", "key", "keys"), "k"),
    **dict.fromkeys(("wv", "value", "values"), "v"),
    **dict.fromkeys(("wo", "o", "output", "dense"), "out"),
    **dict.fromkeys(("ln", "rms", "norms"), "norm"),
    **dict.fromkeys(("embeddings", "embedding", "emb", "wte"), "embed"),
    **dict.fromkeys(("logits",), "head"),
    **dict.fromkeys(("f", "last"), "final"),
    "experts": "expert",
    "router": "gate",
}
_OF_META = {"w1": "gate", "w2": "down", "w3": "up"}
_SAY_NOTHING = {
    *("model", "transformer", "module", "modules", "decoder", "backbone", "net", "lm"),
    *("layer", "layers", "h", "block", "blocks", "weight", "self", "pre", "to"),
    *("proj", "projection", "linear", "lin", "fc", "c", "w", "tok", "token", "tokens"),
    *("gamma", "scale", "kernel"),
}
_PARTS = {"proj": ("q",), "norm": ("k", "norm"), "bias": ("bias",)}  # of a site
# Words that exclude each other.
_GROUPS = ({"q", "k", "v", "out"}, {"gate", "up", "down"}, {"attn", "mlp"}, {"head", "embed"})


def name_words(name: str, names_meta: bool = False) -> Words:
    """The meaningful words of a name, with one spelling for each synonym.

    Args:
        name: of a tensor, or a pattern of names.
        names_meta: whether w1, w2 and w3 mean gate, down and up, as in Meta's Llama.
    """
    text = re.sub(r"(?<![^.])\d+(?![^.])", "", name)  # of layers and experts
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower()
    for pattern, replacement in _PHRASES:
        text = pattern.sub(replacement, text)
    parts = {_SYNONYMS.get(word, word) for word in re.split(r"[\W_]+", text) if word}
    if names_meta:
        parts = {_OF_META.get(word, word) for word in parts}
    return frozenset(parts - _SAY_NOTHING)


def is_of_meta(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Whether a tensor is w1, w2 or w3 of an MLP in the naming of Meta's Llama.

    In other codes w1 and w2 are parallel and have the same shape.

    Args:
        name: its name, or a pattern of names.
        shapes: of all tensors by such names.
    """
    siblings = [re.sub(r"\bw[123]\b", f"w{number}", name) for number in (1, 2, 3)]
    if name not in siblings or not shapes.keys() >= {*siblings}:
        return False
    gate, down, up = (shapes[sibling] for sibling in siblings)
    return gate == up != down


def meanings(
    stored_name: str, weights: Sequence[str], layout: Layout, site: tuple[int, str] | None
) -> list[Words]:
    """Possible names of a tensor, as sets of words.

    Args:
        stored_name: its name in the checkpoint's format.
        weights: the house names of the weights in it.
        layout: the sublayers of the decoder.
        site: of an AttnRes tensor, its site and part.
    """
    if site is not None:
        index, part = site
        is_final = index == layout.num_sublayers
        kinds = ("final", "out") if is_final else (_kind(layout.sublayers[index].kind),)
        return [name_words(weights[0]), *(frozenset({"res", one, *_PARTS[part]}) for one in kinds)]
    candidates = [
        name_words(stored_name, True),
        frozenset[str]().union(*(name_words(one, True) for one in weights)),
    ]
    norm = weights[0].removeprefix("model.").removesuffix(".weight")
    candidates += [
        frozenset({_kind(one.kind), "norm"}) for one in layout.sublayers if one.norm == norm
    ]
    if norm == layout.final_norm:
        candidates.append(frozenset({"final", "norm"}))
    if weights[0] == HEAD:
        candidates.append(frozenset({"out"}))
    if weights[0] in EMBEDDINGS:
        candidates.append(frozenset({"embed"}))
    return candidates


def _kind(kind: str) -> str:
    return {"attention": "attn"}.get(kind, kind)


def shared(one: Words, other: Collection[Words]) -> tuple[float, Words]:
    """The similarity of a name to the nearest meaning, from 0 to 1, and the common words."""
    likest = max(other, key=lambda meaning: _likeness(one, meaning))
    return _likeness(one, likest), one & likest


def _likeness(one: Words, other: Words) -> float:
    return len(one & other) / max(len(one | other), 1)


def contradict(one: Words, other: Collection[Words]) -> bool:
    """Whether the words of a name exclude all of some meanings."""
    return all(
        ("bias" in one) != ("bias" in meaning)
        or any(one & group and meaning & group and not one & meaning & group for group in _GROUPS)
        for meaning in other
    )
