"""Layers of the oracle with one sublayer, three, or others from layer to layer."""

import pytest
import torch
from torch import Tensor

from attnres_serve.verify.oracle import Model, Place, Spec, alike, site_role
from attnres_serve.verify.oracle.rotary import rope_of
from attnres_serve.verify.oracle.spec import starts_by_layers
from attnres_serve.verify.oracle.sublayers import MLP, Attention
from tests.verify.test_oracle import running_logprobs

HIDDEN, EPS, KEY_EPS = 16, 1e-5, 1e-3
IDS = [5, 2, 7, 2, 0, 6]
ROPE = rope_of({"rope_theta": 10000.0})
SUBLAYERS = {
    "attention": Attention(heads=2, kv_heads=1, head_dim=8, rope=ROPE),
    "windowed": Attention(heads=2, kv_heads=1, head_dim=8, rope=ROPE, window=2),
    "mlp": MLP(24),
}
LAYOUTS = {
    "one a layer": alike(4, ("attention",)),
    "three a layer": alike(2, ("attention", "windowed", "mlp")),
    "others from layer to layer": (
        Place(0, "windowed"),
        Place(1, "attention"),
        Place(1, "mlp"),
        Place(2, "attention"),
        Place(2, "mlp"),
        Place(2, "windowed"),
    ),
}


def model_of(layout: tuple[Place, ...], **options) -> Model:
    """Random weights; the names of a kind's tensors begin with the kind."""
    names = {"embedding": "embed", "final_norm": "norm", "final_query": "query", "final_key": "key"}
    for kind in SUBLAYERS:
        names[kind] = f"{{}}.{kind}."
        names |= {f"{kind}_{part}": f"{{}}.{kind}.{part}" for part in ("norm", "query", "key")}
    spec = Spec(names, layout, SUBLAYERS, HIDDEN, 8, EPS, tied=True, key_norm_eps=KEY_EPS)
    for name, value in options.items():
        setattr(spec, name, value)
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5

    weights = {"embed": 4 * random(8, HIDDEN), "norm": 1 + random(HIDDEN)}
    weights |= {"query": 4 * random(HIDDEN), "key": 1 + random(HIDDEN)}
    for place in layout:
        stem = f"{place.layer}.{place.kind}."
        for leaf, shape in SUBLAYERS[place.kind].shapes(HIDDEN).items():
            weights[stem + leaf] = random(*shape)
        weights[stem + "norm"] = 1 + random(HIDDEN)
        weights[stem + "query"], weights[stem + "key"] = 4 * random(HIDDEN), 1 + random(HIDDEN)
    return Model(spec, weights)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("starts", [(0, 1, 2, 3), (0, 3), (0,)], ids=str)
def test_any_layout(layout: tuple[Place, ...], starts: tuple[int, ...]) -> None:
    model = model_of(layout, block_starts=starts)
    torch.testing.assert_close(
        model.logprobs(IDS), running_logprobs(model, IDS), atol=1e-12, rtol=0
    )


def test_blocks_and_queries_by_layer() -> None:
    mixed = LAYOUTS["others from layer to layer"]
    assert [place.layer for place in mixed] == [0, 1, 1, 2, 2, 2]
    assert starts_by_layers(1, mixed) == (0, 1, 3)
    assert starts_by_layers(2, mixed) == (0, 3)
    assert starts_by_layers(2, LAYOUTS["one a layer"]) == (0, 2)
    assert starts_by_layers(1, LAYOUTS["three a layer"]) == (0, 3)
    spec = model_of(mixed, block_starts=(0, 2), shared_queries="layer").spec
    roles = [site_role(spec, site) for site in range(7)]
    assert roles[3:] == [("attention", 2)] * 3 + [("final", None)]
    spec.shared_queries = "block"
    assert [site_role(spec, site) for site in (1, 2, 5)] == [("windowed", 0), *2 * [("mlp", 1)]]
    assert spec.layers == 3 and spec.final == 6
