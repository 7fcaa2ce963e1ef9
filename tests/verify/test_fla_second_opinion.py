"""The oracle against FLA's own `transformer` class, on CPU.

Optional: needs `flash-linear-attention`, `fla-core` and `einops`, and is skipped without them. FLA
computes with Triton kernels and Flash Attention, which a CPU has not, so its leaf functions are
replaced by plain PyTorch (the fixture `fla`). All else is FLA's: the order of the sublayers, which
sources a site sees, the block boundaries, the norms' eps, the config's defaults and how a
checkpoint is written.
"""

import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import GOLDENS, write_fla
from torch import Tensor

from attnres_serve.verify.oracle import load

IDS = [(7 * i * i + 3 * i + 5) % 320 for i in range(48)]
THETA = 10000.0

CASES = {
    "mha-full": {"attnres_block_size": 1, "num_kv_heads": None},
    "gqa-one-layer-blocks": {"attnres_block_size": 2, "num_heads": 4, "num_kv_heads": 2},
    "bias-short-last-block": {"attnres_block_size": 4, "qkv_bias": True, "num_kv_heads": 1},
    "one-block": {"attnres_block_size": 6, "num_kv_heads": 1},
    "one-layer-full": {"attnres_block_size": 1, "num_hidden_layers": 1},
    "qk-norm-eps": {"attnres_block_size": 2, "qk_norm": True, "norm_eps": 1e-3},
    "bias-and-qk-norm": {"attnres_block_size": 1, "qkv_bias": True, "qk_norm": True},
    "null-intermediate": {"attnres_block_size": 4, "intermediate_size": None},
    "null-intermediate-ratio": {
        "attnres_block_size": 2,
        "intermediate_size": None,
        "hidden_ratio": 7,
    },
    "tied": {"attnres_block_size": 2, "tie_word_embeddings": True},
    "window": {"attnres_block_size": 2, "window_size": 7, "num_kv_heads": 1},
    "window-of-one": {"attnres_block_size": 4, "window_size": 1},
    "theta": {"attnres_block_size": 2, "rope_theta": 500000.0},
    "no-attnres": {"attnres_block_size": None, "num_kv_heads": 1},
    "fused-flags": {"attnres_block_size": 4, "fuse_norm": True, "fuse_swiglu": True},
    "fused-flags-no-attnres": {
        "attnres_block_size": None,
        "fuse_norm": True,
        "fuse_swiglu": True,
    },
}


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """flash_attn_func: q [batch, tokens, heads, dim], k and v [batch, tokens, kv_heads, dim].

    `window_size` (left, right) lets a query see `left` earlier keys beside its own; -1 is all.
    """
    assert causal
    tokens, left = q.shape[1], window_size[0]
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (age >= 0) & (age <= (left if left >= 0 else tokens))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **_: object) -> Tensor:
    """rotary_embedding from position 0: x [batch, tokens, heads, dim], tables [tokens.., dim/2]."""
    assert not interleaved
    cos, sin = (table[: x.shape[1], None].to(x.dtype) for table in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def exact_rotary(theta: float) -> Callable[..., Tensor]:
    """`rotary` with tables computed in float64: FLA's are float32 whatever the model's dtype."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **_: object):
        tokens, dim = x.shape[1], x.shape[-1]
        frequency = theta ** -(torch.arange(0, dim, 2).double() / dim)
        angle = torch.arange(tokens).double()[:, None] * frequency
        torch.testing.assert_close(cos[:tokens].double(), angle.cos(), atol=1e-5, rtol=0)
        torch.testing.assert_close(sin[:tokens].double(), angle.sin(), atol=1e-5, rtol=0)
        return rotary(x, angle.cos(), angle.sin(), interleaved)

    return rotate


def mix(
    *,
    query: Tensor,
    residuals: list[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor,
    rms_eps: float,
) -> Tensor:
    """fused_attnres: depth mix of the residuals [..., hidden] and the norm that follows it."""
    stacked = torch.stack(list(residuals))
    norm = torch.nn.functional.rms_norm
    keys = norm(stacked, rms_weight.shape, rms_weight, rms_eps)
    weights = (keys @ query.flatten()).softmax(0)
    mixed = (weights[..., None] * stacked).sum(0)
    return norm(mixed, output_rms_weight.shape, output_rms_weight, rms_eps)


@pytest.fixture(scope="module")
def fla() -> Iterator[SimpleNamespace]:
    """FLA's config and model class, its kernels replaced for as long as the module runs."""
    with warnings.catch_warnings():
        # on import FLA warns that there is neither a GPU nor Flash Attention
        warnings.simplefilter("ignore")
        for name in ("einops", "fla.utils", "fla.models"):
            pytest.importorskip(
                name, reason="FLA's packages fla-core, flash-linear-attention, einops are missing"
            )
        module = importlib.import_module
        modeling = module("fla.models.transformer.modeling_transformer")
        config_class = module("fla.models.transformer").TransformerConfig
        norms = module("fla.modules.norm.layernorm")

    def rms_norm_forward(
        self: torch.nn.Module, x: Tensor, residual: Tensor | None = None, prenorm: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """FLA's fused RMSNorm: adds the residual first and, with `prenorm`, returns the sum too."""
        x = x if residual is None else x + residual
        y = torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return (y, x) if prenorm else y

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(swiglu(gate, up), weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fla.layers.attn.flash_attn_func", sdpa)
        patch.setattr("fla.modules.rotary.ops.rotary_embedding", rotary)
        patch.setattr(modeling, "fused_attnres", mix)
        patch.setattr(norms.RMSNorm, "forward", rms_norm_forward)
        patch.setattr("fla.modules.mlp.swiglu", swiglu)
        patch.setattr("fla.modules.mlp.swiglu_linear", swiglu_linear)
        yield SimpleNamespace(config=config_class, model=modeling.TransformerForCausalLM)


def logprobs(model: torch.nn.Module, ids: Sequence[int] = IDS) -> Tensor:
    """[tokens, vocab]"""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Replaces FLA's initial values, among them queries of zero and norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif "embeddings" in name:
            value = 0.5 * noise
        else:
            value = (2.0 if "res_proj" in name else 1.2) / math.sqrt(parameter.shape[-1]) * noise
        parameter.data.copy_(value)


def assert_agreement(ours: Tensor, theirs: Tensor) -> None:
    """The bound for float32 of the format notes, relative because logits lose digits by size."""
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=2e-5)


@pytest.mark.filterwarnings("ignore")  # FLA's and Transformers' own, none concerns the numbers
@pytest.mark.parametrize("case", CASES)
def test_saved_by_fla(
    case: str, fla: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that FLA wrote: the oracle agrees with the model that wrote it."""
    options = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "rope_theta": THETA,
        "fuse_norm": False,
        "fuse_swiglu": False,
    } | CASES[case]
    model = fla.model(fla.config(**options)).float()
    randomise(model, seed=len(case))
    model.save_pretrained(tmp_path)
    ours, single = load(tmp_path).logprobs(IDS), logprobs(model)
    assert single.std() > 0.5
    assert_agreement(ours, single)
    # in float64, tables included, nothing is left of the difference but rounding
    exact = exact_rotary(options["rope_theta"])
    monkeypatch.setattr("fla.modules.rotary.ops.rotary_embedding", exact)
    double = logprobs(model.double())
    torch.testing.assert_close(double, ours, atol=1e-11, rtol=0)
    print(f"{case}: float32 {(single - ours).abs().max():.2e}", end=", ")
    print(f"float64 {(double - ours).abs().max():.2e}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4},
        {"block_size": 1, "kv_heads": None, "intermediate": None, "qkv_bias": True},
        {"block_size": 2, "qk_norm": True, "tie": True, "window_size": 9},
        {"block_size": None},
    ],
    ids=str,
)
def test_written_by_the_maker(options: dict, fla: SimpleNamespace, tmp_path: Path) -> None:
    """`write_fla` writes what FLA reads: nothing missing, nothing left over, the same numbers."""
    write_fla(tmp_path, **options)
    model, report = fla.model.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert_agreement(load(tmp_path).logprobs(IDS), logprobs(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("golden", ["block", "full", "small_scale"])
def test_replacements_reproduce_the_goldens(golden: str, fla: SimpleNamespace) -> None:
    """The replaced functions are sound: with them FLA still gives the goldens' numbers."""
    folder = GOLDENS / f"fla_transformer_{golden}"
    case = json.loads((folder / "expected.json").read_text())[1]
    model = fla.model.from_pretrained(folder, dtype=torch.float32)
    ids = case["prompt"] + case["output"]
    table = logprobs(model, ids)[:-1]
    found = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    wanted = torch.tensor(case["prompt_logprobs"][1:] + case["output_logprobs"]).double()
    assert_agreement(wanted, found)
