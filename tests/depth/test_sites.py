"""The specification and the schedule made from it: which sources every site reads."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_file import Sentence

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError

EPS = 1e-6
Source = tuple[str, ...]  # what was added up to make it

# Layers, block size in sublayers, starts.
UNIFORM = [
    (3, 1, (0, 1, 2, 3, 4, 5)),
    (4, 2, (0, 2, 4, 6)),
    (4, 4, (0, 4)),
    (6, 6, (0, 6)),
    # The last block is short: by two sublayers, by one, by all but one.
    (5, 4, (0, 4, 8)),
    (4, 3, (0, 3, 6)),
    (3, 5, (0, 5)),
    # As large as the model, and larger: one block.
    (3, 6, (0,)),
    (3, 7, (0,)),
    (3, 10**6, (0,)),
    (1, 1, (0, 1)),
    (1, 2, (0,)),
]


def canonical_sources(spec: AttnResSpec) -> list[list[Source]]:
    """The pseudocode of the two functions, word for word."""
    sources_of = cumulative_sources if spec.cumulative else reset_sources
    return sources_of(spec.layout.num_layers, spec.block_starts)


def cumulative_sources(num_layers: int, starts: tuple[int, ...]) -> list[list[Source]]:
    """The embedding is block 0 and the first partial sum, which is copied and never reset."""
    completed: list[Source] = [("embedding",)]
    partial: Source = ("embedding",)
    read = []
    for s in range(2 * num_layers):
        read.append([*completed, partial])
        partial += (f"sublayer {s}",)
        if s + 1 in starts:
            completed.append(partial)
    read.append([*completed, partial])
    return read


def reset_sources(num_layers: int, starts: tuple[int, ...]) -> list[list[Source]]:
    """ "Read, then close the block"."""
    completed: list[Source] = []
    partial: Source | None = ("embedding",)
    read = []
    for s in range(2 * num_layers):
        read.append([*completed, partial])
        if s in starts:
            completed.append(partial)
            partial = None
        y = (f"sublayer {s}",)
        partial = y if partial is None else partial + y
    read.append([*completed, partial])
    return read


def scheduled_sources(spec: AttnResSpec) -> list[list[Source]]:
    """What the sites read when each adds its input, closes the block it must close, and reads."""
    blocks: list[Source] = []
    partial: Source = ()
    read = []
    for site in sites(spec):
        partial += (f"sublayer {site.index - 1}" if site.index else "embedding",)
        if site.opens_block:
            blocks.append(partial)
            partial = partial if site.cumulative else ()
        assert site.num_blocks == len(blocks)
        assert site.reads_partial == bool(partial)
        assert site.num_sources == len(blocks) + bool(partial)
        read.append([*blocks, partial] if site.reads_partial else list(blocks))
    return read


@st.composite
def specs(draw: st.DrawFn) -> AttnResSpec:
    layers = draw(st.integers(1, 12))
    rest = draw(st.sets(st.integers(1, 2 * layers - 1)))
    final_mix, cumulative = draw(st.booleans()), draw(st.booleans())
    ends = (2 * layers,) if final_mix and cumulative and draw(st.booleans()) else ()
    starts = (0, *sorted(rest), *ends)
    shared = draw(st.sampled_from([None, "layer", "block"]))
    return AttnResSpec(Layout.of(layers), starts, EPS, final_mix, cumulative, shared_queries=shared)


@pytest.mark.parametrize(("layers", "size", "starts"), UNIFORM)
def test_uniform_blocks(layers: int, size: int, starts: tuple[int, ...]) -> None:
    """A block size becomes the starts it means, short last block and one big block included."""
    spec = AttnResSpec.uniform(Layout.of(layers), size, EPS)
    assert spec.block_starts == starts
    assert spec.num_blocks == len(starts)
    assert spec.is_full == (size == 1)


@settings(max_examples=200, deadline=None)
@given(specs())
def test_any_starts_read_the_canonical_sources(spec: AttnResSpec) -> None:
    """Uneven starts too: the same sources, in the same order, at every site."""
    assert scheduled_sources(spec) == canonical_sources(spec)


def test_sources_of_small_models_by_hand() -> None:
    """Blocks of three sublayers; and of two, of which the copy and the sum that goes on count."""
    a, b, c, d, e = "embedding", "sublayer 0", "sublayer 1", "sublayer 2", "sublayer 3"
    assert scheduled_sources(AttnResSpec.uniform(Layout.of(2), 3, EPS)) == [
        [(a,)],
        [(a,), (b,)],
        [(a,), (b, c)],
        [(a,), (b, c, d)],
        [(a,), (b, c, d), (e,)],
    ]
    assert scheduled_sources(AttnResSpec.uniform(Layout.of(2), 2, EPS, cumulative=True))[:4] == [
        [(a,), (a,)],
        [(a,), (a, b)],
        [(a,), (a, b, c), (a, b, c)],
        [(a,), (a, b, c), (a, b, c, d)],
    ]


def test_a_copy_behind_the_last_sublayer_by_hand(sentence: Sentence) -> None:
    """The final site reads it beside the sum; it begins no block of sublayers."""
    a, b, c = "embedding", "sublayer 0", "sublayer 1"
    spec = AttnResSpec(Layout.of(1), (0, 2), EPS, cumulative=True)
    assert scheduled_sources(spec)[-1] == [(a,), (a, b, c), (a, b, c)]
    assert (spec.num_blocks, spec.first_sublayers, spec.is_full) == (1, (0,), False)
    for options in ({}, {"cumulative": True, "final_mix": False}):
        sentence.raises(CheckpointError, AttnResSpec, Layout.of(1), (0, 2), EPS, **options)


@pytest.mark.parametrize("final_mix", [True, False])
def test_only_the_final_site_can_be_without_a_mix(final_mix: bool) -> None:
    """`final_mix` false takes the mix from the last site and from no other."""
    *others, final = sites(AttnResSpec.uniform(Layout.of(3), 2, EPS, final_mix))
    assert all(site.mixes for site in others)
    assert final.mixes is final_mix


def test_a_spec_survives_the_house_dictionary() -> None:
    """What `to_house` writes, `from_house` reads, whatever the base's eps."""
    spec = AttnResSpec(Layout.of(4), (0, 1, 5), 3e-5, False, True, True, 0.5, "block")
    assert AttnResSpec.from_house(spec.to_house(), Layout.of(4), 1e-6) == spec
    assert set(AttnResSpec(Layout.of(4), (0,), 3e-5).to_house()) == {"block_starts", "key_norm_eps"}
    biased = AttnResSpec(Layout.of(4), (0, 3), 3e-5, source_bias=True)
    assert AttnResSpec.from_house(biased.to_house(), Layout.of(4), 1e-6) == biased
    assert [spec.has_biases for spec in (spec, biased)] == [True, True]
    assert not AttnResSpec(Layout.of(4), (0,), 3e-5).has_biases


def test_house_defaults() -> None:
    """The final mix is on and the key norm has the base's eps unless the dictionary says other."""
    two = Layout.of(2)
    assert AttnResSpec.from_house({"block_size": 2}, two, 7e-6) == AttnResSpec(two, (0, 2), 7e-6)
    other = {"block_starts": [0, 3], "final_mix": False, "key_norm_eps": 1e-3}
    assert AttnResSpec.from_house(other, two, 7e-6) == AttnResSpec(two, (0, 3), 1e-3, False)


NO_STARTS = ([], [1], [2, 4], [0, 2.0], [0, True], [False, 2], [0, "2"], [0, None], [-1])
NO_STARTS += (0, "0", None, {"0": 1}, True)
UNORDERED = ([0, 4, 2], [0, 2, 2], [0, -2], [0, 6], [0, 2, 99])  # and beyond six sublayers
NOT_POSITIVE = (0, -1e-6, True, "1e-6", None, float("nan"), float("inf"))
REFUSED_HOUSE: list[Any] = [
    *({"block_size": value} for value in (0, -4, True, False, 2.0, "4", None, [4])),
    *({"block_starts": value} for value in (*NO_STARTS, *UNORDERED)),
    {"block_size": 2, "blocksize": 4},
    {"block_size": 2, "num_layers": 3},
    {"block_size": 2, "block_starts": [0, 2]},
    {},
    {"final_mix": True},
    *({"block_size": 2, "final_mix": value} for value in (0, 1, None, "false")),
    {"block_size": 2, "cumulative": 1},
    {"block_size": 2, "recency_bias": 3.0},
    {"block_size": 2, "source_bias": 1},
    {"block_size": 2, "source_bias": True, "recency_bias": True},
    {"block_size": 2, "source_bias": True, "shared_queries": "block"},
    *({"block_size": 2, "key_norm_eps": value} for value in NOT_POSITIVE),
    *({"block_size": 2, "logit_scale": value} for value in NOT_POSITIVE),
    *({"block_size": 2, "shared_queries": value} for value in ("head", True, ["layer"], 1, "")),
    *(None, 4, [4], "4", True),
]


@pytest.mark.parametrize("attn_res", REFUSED_HOUSE, ids=repr)
def test_house_dictionaries_that_are_refused(attn_res: Any, sentence: Sentence) -> None:
    """Each mistake raises the one error, with what was found in it."""
    sentence.raises(CheckpointError, AttnResSpec.from_house, attn_res, Layout.of(3), EPS)
