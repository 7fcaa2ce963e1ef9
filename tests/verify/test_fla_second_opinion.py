"""The oracle against FLA's own `transformer` class, on CPU.

FLA computes with Triton kernels and Flash Attention, which a CPU has not, so these are replaced, as
`fla_models` says. All else is FLA's.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fla_models
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
    "fused-flags-no-attnres": {"attnres_block_size": None, "fuse_norm": True, "fuse_swiglu": True},
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
        # Angles of up to 48 in float32 are off by 48 roundings of 2^-24.
        torch.testing.assert_close(cos[:tokens].double(), angle.cos(), atol=1e-5, rtol=0)
        torch.testing.assert_close(sin[:tokens].double(), angle.sin(), atol=1e-5, rtol=0)
        return rotary(x, angle.cos(), angle.sin(), interleaved)

    return rotate


@pytest.fixture(scope="module")
def fla() -> Iterator[type]:
    """FLA's class, its kernels replaced for as long as the module runs."""
    with fla_models.on_cpu() as patch:
        patch.setattr("fla.layers.attn.flash_attn_func", sdpa)
        patch.setattr("fla.modules.rotary.ops.rotary_embedding", rotary)
        yield fla_models.classes("transformer")[1]


def logprobs(model: torch.nn.Module, ids: Sequence[int] = IDS) -> Tensor:
    """[tokens, vocab]"""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def assert_agreement(ours: Tensor, theirs: Tensor) -> None:
    """The bound for float32 of the format notes, relative because logits lose digits by size."""
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=2e-5)


@pytest.mark.filterwarnings("ignore")  # FLA's and Transformers' own, none concerns the numbers
@pytest.mark.parametrize("case", CASES)
def test_saved_by_fla(
    case: str, fla: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    model = fla_models.drawn("transformer", len(case), **options).float()
    model.save_pretrained(tmp_path)
    ours, single = load(tmp_path).logprobs(IDS), logprobs(model)
    assert single.std() > 0.5
    assert_agreement(ours, single)
    # in float64, tables included, nothing is left of the difference but rounding
    exact = exact_rotary(options["rope_theta"])
    monkeypatch.setattr("fla.modules.rotary.ops.rotary_embedding", exact)
    double = logprobs(model.double())
    torch.testing.assert_close(double, ours, atol=1e-11, rtol=0)


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
def test_written_by_the_maker(options: dict, fla: type, tmp_path: Path) -> None:
    """`write_fla` writes what FLA reads: nothing missing, nothing left over, the same numbers."""
    write_fla(tmp_path, **options)
    model, report = fla.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert_agreement(load(tmp_path).logprobs(IDS), logprobs(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("golden", ["block", "full", "small_scale"])
def test_replacements_reproduce_the_goldens(golden: str, fla: type) -> None:
    """The replaced functions are sound: with them FLA still gives the goldens' numbers."""
    folder = GOLDENS / f"fla_transformer_{golden}"
    case = json.loads((folder / "expected.json").read_text())[1]
    model = fla.from_pretrained(folder, dtype=torch.float32)
    ids = case["prompt"] + case["output"]
    table = logprobs(model, ids)[:-1]
    found = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    wanted = torch.tensor(case["prompt_logprobs"][1:] + case["output_logprobs"]).double()
    assert_agreement(wanted, found)
