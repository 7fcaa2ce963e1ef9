"""The oracle against the goldens, against Transformers, and against itself written otherwise."""

from pathlib import Path

import pytest
import scaled_eps
import tiny_sites
import torch
from checkpoints import GOLDENS, edit, write_fla, write_house, write_standard
from goldens import expected, oracle_differences

from attnres_serve.verify.oracle import Model, Place, Spec, load, site_role, source_spans, starts_of
from attnres_serve.verify.oracle.spec import starts_by_layers

BASES = ("llama", "mistral", "qwen2", "qwen3")
IDS = [(7 * i * i + 3 * i + 5) % 320 for i in range(40)]
# Of logprobs in float64, summed in another order: a rounding is 1e-16, and those of all sublayers
# with their gains are below 1e-11.
FAR = 1e-10


def running_logprobs(model: Model, ids: list[int]) -> torch.Tensor:
    """The pseudocode of the format notes: a running partial sum and a list of completed blocks."""
    spec = model.spec
    partial: torch.Tensor | None = model.embed(ids)
    completed: list[torch.Tensor] = [partial] if spec.cumulative else []

    def mix(site: int) -> torch.Tensor:
        sources = [*completed, partial]
        role, layer = site_role(spec, site)
        query = model.weight(f"{role}_query", layer).flatten() * model.weight(f"{role}_key", layer)
        scores = [v @ query / (v.square().mean(-1) + spec.key_norm_eps).sqrt() for v in sources]
        scores = [spec.logit_scale * score for score in scores]
        if spec.recency_bias:
            scores[-1] = scores[-1] + model.weight(f"{role}_recency", layer)
        if spec.source_bias:
            for source, bias in enumerate(model.weight(f"{role}_recency", layer)):
                scores[source] = scores[source] + bias
        top = torch.stack(scores).amax(0)
        exponentials = [(score - top).exp() for score in scores]
        weighted = sum(e[:, None] * v for e, v in zip(exponentials, sources, strict=True))
        return weighted / sum(exponentials)[:, None]

    for s in range(spec.final):
        h = mix(s)
        if s in spec.block_starts and not spec.cumulative:
            completed.append(partial)
            partial = None
        y = model.sublayer(s, h)
        partial = y if partial is None else partial + y
        if s + 1 in spec.block_starts and spec.cumulative:
            completed.append(partial)
    return model.head(mix(spec.final) if spec.final_mix else partial)


@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDENS.iterdir()))
def test_golden(golden: str) -> None:
    model = load(GOLDENS / golden)
    for case in expected(GOLDENS / golden):
        assert oracle_differences(model, case) == []


SHAPES = [  # layers, blocks; what the row stresses
    (1, {"block_size": 1}),  # the smallest model, Full
    (1, {"block_size": 2}),  # one block, closed only by the final site
    (3, {"block_size": 1}),  # Full: no site has a partial of more than one output
    (3, {"block_size": 2}),  # one layer a block
    (3, {"block_size": 4}),  # short last block
    (3, {"block_size": 3}),  # a block starts at an MLP
    (3, {"block_size": 5}),  # last block is a single MLP
    (3, {"block_size": 6}),  # one block
    (3, {"block_size": 64}),  # larger than the model
    (4, {"block_starts": [0, 1, 2, 7]}),  # uneven, with blocks of one sublayer at both ends
    (4, {"block_starts": [0, 3, 5]}),  # odd starts
    (4, {"block_starts": [0]}),
]
SHAPE_IDS = [f"L{layers}-{next(iter(blocks.values()))}" for layers, blocks in SHAPES]


@pytest.mark.parametrize(("layers", "blocks"), SHAPES, ids=SHAPE_IDS)
def test_definition_equals_running_form(layers: int, blocks: dict, tmp_path: Path) -> None:
    base = BASES[layers % 3]
    model = load(write_house(tmp_path, base, layers=layers, seed=layers, **blocks))
    torch.testing.assert_close(model.logprobs(IDS), running_logprobs(model, IDS), atol=FAR, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"final_mix": False},
        {"final_mix": True},
        {"key_norm_eps": 0.25},
        {"tie": True},
        *(
            {"attn_res": attn_res}
            for attn_res in (
                {"cumulative": True},
                {"recency_bias": True},
                {"cumulative": True, "recency_bias": True, "final_mix": False},
                {"source_bias": True},
                {"source_bias": True, "cumulative": True, "final_mix": False},
                {"logit_scale": 0.125},
                {"shared_queries": "layer"},
                {"shared_queries": "block", "recency_bias": True, "logit_scale": 2},
            )
        ),
    ],
    ids=str,
)
def test_options_in_both_forms(options: dict, tmp_path: Path) -> None:
    model = load(write_house(tmp_path / "a", "qwen3", block_size=4, **options))
    plain = load(write_house(tmp_path / "b", "qwen3", block_size=4))
    logprobs = model.logprobs(IDS)
    torch.testing.assert_close(logprobs, running_logprobs(model, IDS), atol=FAR, rtol=0)
    changed = (logprobs - plain.logprobs(IDS)).abs().max() > 1e-2
    assert changed == (options != {"final_mix": True})


def test_source_spans_by_hand() -> None:
    assert source_spans((0, 3, 5), 0) == []
    assert source_spans((0, 3, 5), 2) == [(0, 2)]
    assert source_spans((0, 3, 5), 3) == [(0, 3)]
    assert source_spans((0, 3, 5), 4) == [(0, 3), (3, 4)]
    assert source_spans((0, 3, 5), 8) == [(0, 3), (3, 5), (5, 8)]
    assert starts_of(4, 10) == (0, 4, 8)


def test_blocks_and_queries_by_layer() -> None:
    """Of layers with one sublayer, or others from layer to layer."""
    kinds = (("windowed",), ("attention", "mlp"), ("attention", "mlp", "windowed"))
    mixed = tuple(Place(layer, kind) for layer, own in enumerate(kinds) for kind in own)
    assert starts_by_layers(1, mixed) == (0, 1, 3)
    assert starts_by_layers(2, mixed) == (0, 3)
    spec = Spec({}, mixed, {}, 16, 8, 1e-5, tied=True, block_starts=(0, 2), shared_queries="layer")
    roles = [site_role(spec, site) for site in range(7)]
    assert roles[3:] == [("attention", 2)] * 3 + [("final", None)]
    spec.shared_queries = "block"
    assert [site_role(spec, site) for site in (1, 2, 5)] == [("windowed", 0), *2 * [("mlp", 1)]]
    assert spec.layers == 3 and spec.final == 6


@pytest.mark.parametrize(
    ("number", "blocks"), [*enumerate(b for layers, b in SHAPES if layers != 1)], ids=str
)
def test_zero_queries_are_ordinary_residuals(number: int, blocks: dict, tmp_path: Path) -> None:
    """Every mix is then a mean, and RMSNorm(x / n, eps) = RMSNorm(x, n^2 eps)."""
    base, layers = BASES[number % 4], 4 if "block_starts" in blocks else 3
    # a stream near sqrt(eps), so that the factor n^2 shows
    options = {"layers": layers, "scale": 0.01, "rms_norm_eps": 1e-5}
    plain = write_standard(tmp_path / "plain", base, **options)
    house = load(write_house(tmp_path / "house", base, zero_queries=True, **blocks, **options))
    scaled = scaled_eps.load(plain, house.spec.starts)
    logprobs = house.logprobs(IDS)
    torch.testing.assert_close(logprobs, scaled.logprobs(IDS), atol=FAR, rtol=0)
    assert (logprobs - load(plain).logprobs(IDS)).abs().max() > 1e-3


STANDARD = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"heads": 4, "kv_heads": 2, "tie": True, "rope_theta": 500000.0}),
    ("mistral", {"heads": 4, "kv_heads": 2}),
    ("mistral", {"changes": {"sliding_window": None}}),
    ("mistral", {"changes": {"sliding_window": 8}}),
    ("qwen2", {"heads": 2, "kv_heads": 2}),
    ("qwen2", {"tie": True}),
    ("qwen3", {"heads": 4, "kv_heads": 2}),
    ("qwen3", {"attention_bias": True, "rms_norm_eps": 1e-5, "scale": 0.01}),
]


@pytest.mark.parametrize(("base", "options"), STANDARD, ids=str)
def test_transformers(base: str, options: dict, tmp_path: Path) -> None:
    """Ordinary residuals against Transformers' own classes in float64."""
    write_standard(tmp_path, base, **options)
    check_transformers(tmp_path, IDS)


TRAINED = {"original_max_position_embeddings": 40}
SCALED = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | TRAINED,
    {"rope_type": "yarn", "factor": 4.0} | TRAINED,
    {"rope_type": "yarn", "factor": 1.0} | TRAINED,
]


@pytest.mark.parametrize("rope", SCALED, ids=str)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_scaled_rotary_embeddings(rope: dict, key: str, tmp_path: Path) -> None:
    """Beyond the trained length, against Transformers' own tables."""
    stated = rope | ({"rope_theta": 500.0} if key == "rope_parameters" else {})
    changes = {"rope_parameters": None, "rope_theta": 500.0, key: stated}
    write_standard(tmp_path, "llama", heads=2, head_dim=64, changes=changes)
    check_transformers(tmp_path, [(31 * i * i + 7 * i) % 320 for i in range(130)])


def check_transformers(folder: Path, ids: list[int]) -> None:
    wanted = tiny_sites.load(folder).logprobs(ids)
    # transformers' rotary tables and eps make more roundings.
    torch.testing.assert_close(load(folder).logprobs(ids), wanted, atol=10 * FAR, rtol=0)


def test_a_window_sees_no_further(tmp_path: Path) -> None:
    """One layer with a window of W: the last row depends on the last W tokens only."""
    model = load(write_fla(tmp_path, layers=1, window_size=4, qkv_bias=True, qk_norm=True))
    base = model.logprobs(IDS)[-1]
    for back, seen in ((3, True), (4, False)):
        changed = list(IDS)
        changed[-1 - back] = (changed[-1 - back] + 1) % 320
        assert ((model.logprobs(changed)[-1] - base).abs().max() > 1e-6) == seen


REFUSED = [
    ({"attn_res": {"block_size": 2, "block_sizes": 2}}, "attn_res options"),
    ({"attn_res": {"block_size": 2, "block_starts": [0, 2]}}, "attn_res options"),
    ({"attn_res": {}}, "attn_res options"),
    ({"attn_res": {"block_size": 0}}, "block size"),
    ({"attn_res": {"block_starts": [1, 2]}}, "block starts"),
    ({"attn_res": {"block_starts": [0, 3, 2]}}, "block starts"),
    ({"attn_res": {"block_starts": [0, 6]}}, "block starts"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "rotary embedding"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary embedding"),
    ({"sliding_window": 4}, "sliding windows"),
    ({"layer_types": ["sliding_attention"]}, "sliding windows"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"model_type": "qwen3_dar"}, "model_type"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=str)
def test_unknown_settings_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    edit(write_house(tmp_path, block_size=2), **change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
