"""The recurrence in torch against transformers' own code of each mixer, all in float64."""

from itertools import pairwise

import pytest
import torch
from ragged import Ragged, random
from torch import Tensor, nn

from attnres_serve.kernels.recurrence import in_torch
from attnres_serve.verify.rewritten.wide import wide_module

MODELS = "transformers.models"


def sequences(batch: Ragged):
    """Each sequence's number, its tokens and the state ``[1, H, K, V]`` that it begins from."""
    starts = batch.starts.tolist()
    for n, (begin, end) in enumerate(pairwise(starts)):
        state = batch.state[batch.slots[n]].mT[None].clone()
        if not batch.has_history[n]:
            state.zero_()
        yield n, slice(begin, end), state


def check(batch: Ragged, judge) -> None:
    """``judge`` takes a sequence's tokens and state; it returns outputs and state ``[1, ...]``."""
    far = 1e-13  # some hundred roundings of 2^-53, of numbers of size one and more
    out, state = batch.run(in_torch.recurrence)
    untouched = batch.state.clone()
    for n, tokens, before in sequences(batch):
        expected, after = judge(batch, tokens, before)
        torch.testing.assert_close(out[tokens], expected[0], rtol=0, atol=far)
        torch.testing.assert_close(state[batch.slots[n]], after[0].mT, rtol=0, atol=far)
        untouched[batch.slots[n]] = state[batch.slots[n]]
    assert torch.equal(state, untouched)


def by_delta_rule(function):
    def judge(batch: Ragged, tokens: slice, before: Tensor):
        share = batch.v.shape[1] // batch.q.shape[1]
        q, k = (x[None, tokens].repeat_interleave(share, 2) for x in (batch.q, batch.k))
        decay, beta = batch.decay[None, tokens].log(), batch.beta[None, tokens]
        if decay.shape[-1] == 1:
            decay = decay[..., 0]
        return function(q, k, batch.v[None, tokens], decay, beta, before, True)

    return judge


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), (7, 5)])
def test_kimi_delta_attention(key_dim, value_dim):
    module = wide_module(f"{MODELS}.kimi_linear.modeling_kimi_linear")
    batch = random("channel", key_dim=key_dim, value_dim=value_dim)
    check(batch, by_delta_rule(module.recurrent_kimi_delta_attention))


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_gated_delta_net(shared):
    module = wide_module(f"{MODELS}.qwen3_next.modeling_qwen3_next")
    batch = random("head", shared=shared, key_dim=24, value_dim=16)
    check(batch, by_delta_rule(module.torch_recurrent_gated_delta_rule))


class Kept:
    """A cache of one layer's state, as MiniMax's layer asks for it."""

    def __init__(self, state: Tensor | None) -> None:
        self.state = state

    def get_linear_cache(self, _) -> Tensor | None:
        return self.state

    def set_linear_cache(self, _, state: Tensor) -> None:
        self.state = state


class Open(nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        return torch.full((*qkv.shape[:2], qkv.shape[2] // 3), torch.inf)


def lightning(heads: int, size: int, block: int):
    """MiniMax's layer without its projections, norm and gate."""
    from transformers import MiniMaxConfig

    config = MiniMaxConfig(
        hidden_size=heads * size,
        num_attention_heads=heads,
        head_dim=size,
        num_hidden_layers=4,
        block_size=block,
    )
    module = wide_module(f"{MODELS}.minimax.modeling_minimax")
    layer = module.MiniMaxLightningAttention(config, 1).double()
    layer.act_fn = layer.norm = layer.qkv_proj = layer.out_proj = nn.Identity()
    layer.output_gate = Open()
    # The layer has float32 tables before it is widened.
    layer.slope_rate = layer.get_slope_rate().double()
    tables = layer.decay_factors(layer.slope_rate)
    layer.query_decay, layer.key_decay, layer.diagonal_decay = tables
    return layer


def test_lightning_attention_across_its_blocks():
    heads, size = 4, 16
    layer = lightning(heads, size, block=8)
    batch = random("constant", heads=heads, key_dim=size, value_dim=size)
    slope = layer.slope_rate.flatten()
    batch = batch.part(decay=torch.exp(-slope).view(1, heads, 1))

    def judge(batch: Ragged, tokens: slice, before: Tensor):
        qkv = torch.cat([batch.q * batch.scale, batch.k, batch.v], dim=-1)[None, tokens]
        kept = Kept(before if before.any() else None)
        out, _ = layer(qkv.flatten(2), None, None, kept)
        return out.unflatten(-1, (heads, size)), kept.state

    check(batch, judge)
