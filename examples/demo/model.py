"""A Llama-style decoder with Block Attention Residuals, written to be read.

A *sublayer* is one attention or one MLP. Instead of adding every sublayer to one residual stream,
the model keeps the sum of each finished block of sublayers (the token embedding is a block of its
own), and a learned query per sublayer mixes them: a softmax over depth. The module names are the
tensor names of the checkpoint, so `state_dict()` is the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Everything that fixes the architecture; the names are those of a Llama config."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 448
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    block_size: int = 4  # sublayers per block


def mix(sources: list[Tensor], query: Tensor, key_norm: nn.RMSNorm) -> Tensor:
    """Attention over depth: softmax(query . rms_norm(source)) weighs the raw sources, in fp32."""
    values = torch.stack(sources).float()
    inverse_rms = torch.rsqrt(values.square().mean(-1) + key_norm.eps)
    scores = (values * (query[0] * key_norm.weight)).sum(-1) * inverse_rms
    return (scores.softmax(0).unsqueeze(-1) * values).sum(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` [batch, heads, length, head_dim], half-split (NeoX)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads.

    It is spelled out: for short contexts on a CPU this is faster than the fused operator.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.group = shape.num_attention_heads // shape.num_key_value_heads
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, future: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        y = (scores + future.to(scores.dtype)).softmax(-1).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """The gated feed-forward network. It has no use for positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, *_positions: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Two sublayers, their pre-norms, and the query and key norm of the mix that feeds each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.self_attention_res_proj = nn.Linear(size, 1, bias=False)
        self.self_attention_res_norm = nn.RMSNorm(size, eps)
        self.mlp_res_proj = nn.Linear(size, 1, bias=False)
        self.mlp_res_norm = nn.RMSNorm(size, eps)

    def sites(self) -> Iterator[tuple[nn.Linear, nn.RMSNorm, nn.RMSNorm, nn.Module]]:
        """Query, key norm, pre-norm and sublayer, in the order of the computation."""
        attention_mix = self.self_attention_res_proj, self.self_attention_res_norm
        yield *attention_mix, self.input_layernorm, self.self_attn
        yield self.mlp_res_proj, self.mlp_res_norm, self.post_attention_layernorm, self.mlp


class Decoder(nn.Module):
    """The stack, from token ids to normed hidden states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block_size = shape.block_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.output_attn_res_proj = nn.Linear(shape.hidden_size, 1, bias=False)
        self.output_attn_res_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        length, head_dim = shape.max_position_embeddings, shape.head_dim
        frequency = shape.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(length), frequency).repeat(1, 2)
        future = torch.full((length, length), -torch.inf).triu(1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("future", future, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        positions = self.cos[:length], self.sin[:length], self.future[:length, :length]
        blocks: list[Tensor] = []  # the finished blocks; the embedding is the first
        partial: Tensor | None = self.embed_tokens(ids)  # the sum of the open block
        sites = (site for layer in self.layers for site in layer.sites())
        for index, (query, key_norm, pre_norm, sublayer) in enumerate(sites):
            mixed = mix([*blocks, partial], query.weight, key_norm)
            if index % self.block_size == 0:
                blocks.append(partial)
                partial = None
            y = sublayer(pre_norm(mixed), *positions)
            partial = y if partial is None else partial + y
        final = [*blocks, partial]
        return self.norm(mix(final, self.output_attn_res_proj.weight, self.output_attn_res_norm))


class AttnResLlama(nn.Module):
    """The language model: the decoder and a head tied to the embedding."""

    decoder = Decoder

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = self.decoder(shape)
        for name, parameter in self.named_parameters():
            if name.endswith("res_proj.weight"):
                nn.init.zeros_(parameter)  # every mix starts as a plain mean
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.model(ids), self.model.embed_tokens.weight)

    def queries(self) -> list[nn.Parameter]:
        """The queries of all mixing sites."""
        return [p for n, p in self.named_parameters() if n.endswith("res_proj.weight")]
