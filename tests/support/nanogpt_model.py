"""BabyLM's nanoGPT as a torch module with the format's own names, to check the oracle with.

It shares nothing with the oracle: rotary embedding by complex numbers, torch's attention and norms,
and AttnRes as the format's own source tells it: read the sources, then close the block. Parameters
are loaded strictly, so a name or a shape that is not the format's is an error.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [heads, tokens, dim]: channel i and channel i + dim/2 are one complex number, turned."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(angle.new_ones(()), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size, bias = config["n_embd"], config["bias"]
        self.heads, self.theta = config["n_head"], config["rope_theta"]
        self.c_attn = nn.Linear(size, 3 * size, bias=bias)
        if config["use_attn_gate"]:
            self.attn_gate = nn.Linear(size, size, bias=bias)
        self.c_proj = nn.Linear(size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens, size = x.shape
        # [3 * size] is [3, heads, size / heads]: which of q, k, v comes first, then the head
        fused = self.c_attn(x).view(tokens, 3, self.heads, size // self.heads)
        q, k, v = fused.permute(1, 2, 0, 3)
        q, k = rotated(q, self.theta), rotated(k, self.theta)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(0, 1).reshape(tokens, size)
        return self.c_proj(y * self.attn_gate(x).sigmoid() if hasattr(self, "attn_gate") else y)


class SwiGLU(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size, bias = config["n_embd"], config["bias"]
        width = round(int(config["swiglu_mult"] * size) / 64) * 64
        self.c_gate = nn.Linear(size, width, bias=bias)
        self.c_val = nn.Linear(size, width, bias=bias)
        self.c_proj = nn.Linear(width, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_val(x))


class Block(nn.Module):
    def __init__(self, config: dict, index: int) -> None:
        super().__init__()
        size, eps = config["n_embd"], config["layer_norm_epsilon"]
        self.ln_1, self.attn = RMSNorm(size, eps), Attention(config)
        self.ln_2, self.mlp = RMSNorm(size, eps), SwiGLU(config)
        self.mixes = config["use_attn_res"]
        if self.mixes:
            self.opens = 2 * index % config["attn_res_block_size"] == 0
            self.attn_res_q1 = nn.Parameter(torch.empty(size))
            self.attn_res_q2 = nn.Parameter(torch.empty(size))
            self.attn_res_norm1, self.attn_res_norm2 = RMSNorm(size, 1e-5), RMSNorm(size, 1e-5)

    def forward(self, blocks: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        """`blocks`: those finished; `x`: the running partial sum, or the residual stream."""
        if not self.mixes:
            x = x + self.attn(self.ln_1(x))
            return blocks, x + self.mlp(self.ln_2(x))
        read = mix([*blocks, x], self.attn_res_q1, self.attn_res_norm1)
        if self.opens:
            blocks, x = [*blocks, x], torch.zeros_like(x)
        x = x + self.attn(self.ln_1(read))
        read = mix([*blocks, x], self.attn_res_q2, self.attn_res_norm2)
        return blocks, x + self.mlp(self.ln_2(read))


def mix(sources: list[Tensor], query: Tensor, norm: RMSNorm) -> Tensor:
    """[tokens, size] each; softmax over depth."""
    values = torch.stack(sources, dim=1)
    weights = F.softmax(norm(values) @ query, dim=1)
    return (weights[:, None] @ values)[:, 0]


class NanoGPT(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size = config["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config["vocab_size"], size),
                "h": nn.ModuleList(Block(config, index) for index in range(config["n_layer"])),
                "ln_f": RMSNorm(size, config["layer_norm_epsilon"]),
            }
        )
        if not config.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(size, config["vocab_size"], bias=False)
        if config["use_attn_res"]:
            self.attn_res_qf = nn.Parameter(torch.empty(size))
            self.attn_res_normf = RMSNorm(size, 1e-5)

    def forward(self, ids: list[int]) -> Tensor:
        """Log-probabilities [tokens, vocab] of what comes after each token."""
        blocks, x = [], self.transformer["wte"](torch.tensor(ids))
        for block in self.transformer["h"]:
            blocks, x = block(blocks, x)
        if hasattr(self, "attn_res_qf"):
            x = mix([*blocks, x], self.attn_res_qf, self.attn_res_normf)
        head = self.lm_head if hasattr(self, "lm_head") else self.transformer["wte"]
        return (self.transformer["ln_f"](x) @ head.weight.T).log_softmax(-1)


def load(folder: Path) -> NanoGPT:
    """A checkpoint in float64."""
    model = NanoGPT(json.loads((folder / "config.json").read_text())).double().requires_grad_(False)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
