"""Tensor names as sets of words, to compare names that different projects gave."""

import re
from collections.abc import Collection, Mapping, Sequence

from attnres_serve.depth.layout import Layout
from attnres_serve.families.family import EMBEDDINGS, HEAD, Shape

Words = frozenset[str]

# Spellings of a phrase, and the words that replace all of them.
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
# What w1, w2 and w3 mean in the names of Meta's Llama.
_META_WORDS = {"w1": "gate", "w2": "down", "w3": "up"}
_MEANINGLESS = {
    *("model", "transformer", "module", "modules", "decoder", "backbone", "net", "lm"),
    *("layer", "layers", "h", "block", "blocks", "weight", "self", "pre", "to"),
    *("proj", "projection", "linear", "lin", "fc", "c", "w", "tok", "token", "tokens"),
    *("gamma", "scale", "kernel"),
}
# The words for each part of a site.
_PART_WORDS = {"proj": ("q",), "norm": ("k", "norm"), "bias": ("bias",)}
# Groups of words of which a tensor can mean only one.
_EXCLUSIVE = ({"q", "k", "v", "out"}, {"gate", "up", "down"}, {"attn", "mlp"}, {"head", "embed"})


def name_words(name: str, is_from_meta: bool = False) -> Words:
    """The meaningful words of a name, with one spelling for each synonym.

    Args:
        name: a tensor's name, or a pattern of names.
        is_from_meta: whether w1, w2 and w3 mean gate, down and up, as in Meta's Llama.
    """
    text = re.sub(r"(?<![^.])\d+(?![^.])", "", name)  # numbers of layers and experts
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower()
    for pattern, replacement in _PHRASES:
        text = pattern.sub(replacement, text)
    words = {_SYNONYMS.get(word, word) for word in re.split(r"[\W_]+", text) if word}
    if is_from_meta:
        words = {_META_WORDS.get(word, word) for word in words}
    return frozenset(words - _MEANINGLESS)


def has_name_of_meta(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Whether a tensor is w1, w2 or w3 of an MLP that is named as in Meta's Llama.

    Other projects call the gate and up matrices, which have the same shape, w1 and w2.

    Args:
        name: the tensor's name, or a pattern of names.
        shapes: the shapes of all tensors, by their names or patterns.
    """
    siblings = [re.sub(r"\bw[123]\b", f"w{number}", name) for number in (1, 2, 3)]
    if name not in siblings or not shapes.keys() >= {*siblings}:
        return False
    gate, down, up = (shapes[sibling] for sibling in siblings)
    return gate == up != down


def meanings(
    stored_name: str, weights: Sequence[str], layout: Layout, site: tuple[int, str] | None
) -> list[Words]:
    """What the name of a tensor may say: one set of words for each possible name.

    Args:
        stored_name: the tensor's name in the checkpoint's format.
        weights: the house names of the weights that the tensor holds.
        layout: the sublayers of the decoder.
        site: the number of the site and its part; None if the tensor belongs to no site.
    """
    if site is not None:
        index, part = site
        is_final = index == layout.num_sublayers
        site_words = ("final", "out") if is_final else (_kind_word(layout.sublayers[index].kind),)
        return [
            name_words(weights[0]),
            *(frozenset({"res", site_word, *_PART_WORDS[part]}) for site_word in site_words),
        ]
    candidates = [
        name_words(stored_name, True),
        frozenset[str]().union(*(name_words(weight, True) for weight in weights)),
    ]
    norm = weights[0].removeprefix("model.").removesuffix(".weight")
    candidates += [
        frozenset({_kind_word(sublayer.kind), "norm"})
        for sublayer in layout.sublayers
        if sublayer.norm == norm
    ]
    if norm == layout.final_norm:
        candidates.append(frozenset({"final", "norm"}))
    if weights[0] == HEAD:
        candidates.append(frozenset({"out"}))
    if weights[0] in EMBEDDINGS:
        candidates.append(frozenset({"embed"}))
    return candidates


def _kind_word(kind: str) -> str:
    """The word for a kind of sublayer."""
    return {"attention": "attn"}.get(kind, kind)


def best_likeness(name: Words, meanings: Collection[Words]) -> tuple[float, Words]:
    """The likeness of a name to the most similar meaning, from 0 to 1, and their common words."""
    best = max(meanings, key=lambda meaning: _likeness(name, meaning))
    return _likeness(name, best), name & best


def _likeness(name: Words, meaning: Words) -> float:
    """The share of words that both have."""
    return len(name & meaning) / max(len(name | meaning), 1)


def contradicts_all(name: Words, meanings: Collection[Words]) -> bool:
    """Whether the words of a name contradict every one of some meanings."""
    return all(
        ("bias" in name) != ("bias" in meaning)
        or any(
            name & group and meaning & group and not name & meaning & group for group in _EXCLUSIVE
        )
        for meaning in meanings
    )
