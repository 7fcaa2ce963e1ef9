"""The layout of a decoder, also of those that do not alternate attention and MLP."""

from typing import Any

import pytest
from on_file import Sentence

from attnres_serve.checkpoints.names import expected_parts, site_of, tensor_name
from attnres_serve.depth.layout import Layout, Sublayer
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError

EPS = 1e-6
# A mixer alone, attention and MLP behind other norms, and three sublayers; another final norm.
MIXED = Layout(
    (
        Sublayer(0, "mixer", "layers.0.norm"),
        Sublayer(1, "attention", "layers.1.attention_layernorm"),
        Sublayer(1, "mlp", "layers.1.feedforward_layernorm"),
        Sublayer(2, "mixer", "layers.2.norm"),
        Sublayer(3, "attention", "layers.3.first.norm"),
        Sublayer(3, "cross_attention", "layers.3.second.norm"),
        Sublayer(3, "mlp", "layers.3.third.norm"),
    ),
    final_norm="norm_f",
)


def test_the_common_decoder() -> None:
    """Attention and MLP in every layer, with the norms that most families have."""
    layout = Layout.of(2)
    assert (layout.num_layers, layout.num_sublayers) == (2, 4)
    found = sites(AttnResSpec(layout, (0,), EPS))
    assert [(site.layer, site.kind, site.norm) for site in found] == [
        (0, "attention", "layers.0.input_layernorm"),
        (0, "mlp", "layers.0.post_attention_layernorm"),
        (1, "attention", "layers.1.input_layernorm"),
        (1, "mlp", "layers.1.post_attention_layernorm"),
        (None, "final", "norm"),
    ]


def test_one_sublayer_in_a_layer_and_three() -> None:
    """The sites stand where the sublayers are, under the names of their norms."""
    assert (MIXED.num_layers, MIXED.num_sublayers) == (4, 7)
    found = sites(AttnResSpec(MIXED, (0, 3), EPS))
    norms = [sublayer.norm for sublayer in MIXED.sublayers]
    assert [site.norm for site in found] == [*norms, "norm_f"]
    assert [site.name for site in found[2:]] == [
        "the MLP of layer 1",
        "the mixer of layer 2",
        "the attention of layer 3",
        "the cross_attention of layer 3",
        "the MLP of layer 3",
        "the final norm",
    ]
    assert [site.num_sources for site in found] == [1, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("shared", "owners"),
    [(None, [*range(8)]), ("layer", [0, 1, 1, 3, 4, 4, 4, 7]), ("block", [0, 0, 2, 2, 2, 2, 6, 7])],
)
def test_shared_queries_follow_the_layers(shared: str | None, owners: list[int]) -> None:
    spec = AttnResSpec(MIXED, (0, 2, 6), EPS, shared_queries=shared)
    assert [site.tensors for site in sites(spec)] == owners


@pytest.mark.parametrize(
    ("size", "starts"), [(1, (0, 1, 3, 4)), (2, (0, 3)), (3, (0, 4)), (9, (0,))]
)
def test_blocks_in_layers(size: int, starts: tuple[int, ...]) -> None:
    """A block of layers has as many sublayers as they have."""
    assert AttnResSpec.by_layers(MIXED, size, EPS).block_starts == starts
    twice = tuple(range(0, 8, 2 * size))
    assert AttnResSpec.by_layers(Layout.of(4), size, EPS).block_starts == twice


def test_blocks_in_sublayers() -> None:
    spec = AttnResSpec.uniform(MIXED, 3, EPS)
    assert spec.block_starts == (0, 3, 6) and not spec.is_full
    assert AttnResSpec.uniform(MIXED, 1, EPS).is_full


def test_names_of_tensors() -> None:
    """Attention has the name that Kimi gave it; other kinds have their own."""
    names = [tensor_name(site, "proj", MIXED) for site in range(8)]
    assert names == [
        "model.layers.0.mixer_res_proj.weight",
        "model.layers.1.self_attention_res_proj.weight",
        "model.layers.1.mlp_res_proj.weight",
        "model.layers.2.mixer_res_proj.weight",
        "model.layers.3.self_attention_res_proj.weight",
        "model.layers.3.cross_attention_res_proj.weight",
        "model.layers.3.mlp_res_proj.weight",
        "model.output_attn_res_proj.weight",
    ]
    spec = AttnResSpec(MIXED, (0,), EPS, recency_bias=True)
    for site, part in expected_parts(spec):
        assert site_of(tensor_name(site, part, MIXED), MIXED) == (site, part)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("model.layers.0.mlp_res_proj.weight", True),  # layer 0 has a mixer alone
        ("model.layers.9.mixer_res_norm.weight", True),
        ("model.layers.0.moe_res_proj.weight", False),
        ("model.layers.1.attention_res_proj.weight", False),
        ("model.layers.1.mlp.up_proj.weight", False),
    ],
)
def test_tensors_of_no_site(name: str, is_ours: bool) -> None:
    """A query that the model has no site for is told from a tensor of the base model."""
    assert site_of(name, MIXED) == ((8, "proj" if "proj" in name else "norm") if is_ours else None)


def test_two_sublayers_of_one_kind_in_a_layer(sentence: Sentence) -> None:
    """Their tensors could not be told apart."""
    sentence.raises(ValueError, Layout.of, 1, (("mlp", "first"), ("mlp", "second")))


@pytest.mark.parametrize("layers", [0, -1, True, 3.0, "3", None, 10_001], ids=repr)
def test_numbers_of_layers_that_are_refused(layers: Any, sentence: Sentence) -> None:
    """A model needs a whole positive number of layers, and fewer than fill the memory."""
    sentence.raises(CheckpointError, Layout.of, layers)
