"""Ring-linear in float64: Hugging Face's DeepSeek-V3, with lightning attention in linear layers.

Latent attention and experts are DeepSeek-V3's. Lightning attention is written down from its paper
(arXiv 2401.04658) and the code of MiniMax-Text-01, whose slopes it has; the norm of queries and
keys, the rotated part of a head and the gated norm of groups are Ring-linear's.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tiny_sites
import torch
from torch import Tensor, nn

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import Rewritten, hugging_face

SAME = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta"),
    *("rms_norm_eps", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
RENAMED = (
    ("word_embeddings", "embed_tokens"),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    ("gate.expert_bias", "gate.e_score_correction_bias"),
)


@dataclass
class Judge(Rewritten):
    """A checkpoint; ``stated`` is its config.json."""

    stated: dict[str, Any] = field(default_factory=dict)


class Ring(Judge):
    @cached_property
    def hf(self) -> Any:
        depth = oracle.depth_shapes(self.spec)
        weights = {name: tensor for name, tensor in self.weights.items() if name not in depth}
        group, layers = self.stated["layer_group_size"], self.stated["num_hidden_layers"]
        linear = [layer for layer in range(layers) if (layer + 1) % group]
        own: dict[int, dict[str, Tensor]] = {}
        for layer in linear:
            prefix = f"model.layers.{layer}.attention."
            names = [name for name in weights if name.startswith(prefix)]
            parts = {name: weights.pop(name) for name in names}
            own[layer] = {
                name.removeprefix(prefix).removesuffix(".weight"): part
                for name, part in parts.items()
            }
        for old, new in RENAMED:
            weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
        full = f"model.layers.{group - 1}.self_attn."  # whose shapes the class wants everywhere
        stand_in = {name: part for name, part in weights.items() if name.startswith(full)}
        for layer in linear:
            prefix = f"model.layers.{layer}.self_attn."
            weights |= {name.replace(full, prefix): part for name, part in stand_in.items()}
        model = hugging_face.build(self.config, weights)
        for layer in linear:
            model.model.layers[layer].self_attn = Lightning(self.stated, layer, own[layer])
        return model


class Lightning(nn.Module):
    """o_t = q_t S_t with S_t = exp(-s) S_(t-1) + k_t v_t, gated and projected."""

    def __init__(self, stated: dict[str, Any], layer: int, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.stated, self.weights = stated, weights
        heads, depth = stated["num_attention_heads"], stated["num_hidden_layers"] - 1
        assert heads & (heads - 1) == 0
        slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
        self.decay = torch.exp(-slopes * (1 - layer / depth + 1e-5))[:, None, None]

    def norm(self, x: Tensor, weight: Tensor | float) -> Tensor:
        eps = self.stated["rms_norm_eps"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def rotate(self, x: Tensor) -> Tensor:
        half = int(x.shape[-1] * self.stated["partial_rotary_factor"]) // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = torch.arange(len(x))[:, None, None] * self.stated["rope_theta"] ** -powers
        one, two, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        (x,), w, size = hidden_states, self.weights, self.stated["head_dim"]
        q, k, v = ((x @ part.T).unflatten(-1, (-1, size)) for part in w["query_key_value"].chunk(3))
        q = self.rotate(self.norm(q, w["query_layernorm"])) / math.sqrt(size)
        k = self.rotate(self.norm(k, w["key_layernorm"]))
        state, given = torch.zeros(()), []
        for one_q, one_k, one_v in zip(q, k, v, strict=True):
            state = self.decay * state + one_k[:, :, None] * one_v[:, None, :]
            given.append((one_q[:, None] @ state).flatten())
        groups = torch.stack(given).unflatten(-1, (self.stated["group_norm_size"], -1))
        gate = torch.sigmoid(x @ w["g_proj"].T)
        return ((self.norm(groups, 1.0).flatten(1) * w["g_norm"] * gate) @ w["dense"].T)[None], None


def read(model: type[Judge], hf: str, same: tuple[str, ...], folder: Path) -> Judge:
    """A checkpoint of the house format, as ``model`` with the configuration of the class ``hf``."""
    stated = json.loads((folder / "config.json").read_text())
    experts = {
        "n_routed_experts": stated["num_experts"],
        "n_shared_experts": stated["num_shared_experts"],
    }
    own = hugging_face.config(hf, {key: stated[key] for key in same} | experts)
    base = stated["model_type"].removeprefix("attnres_")
    sites = tiny_sites.sites_of(base, stated["num_hidden_layers"])
    names = oracle.depth_names("attention", "mlp")
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    eps = stated["rms_norm_eps"]
    spec = oracle.Spec(names, layout, {}, own.hidden_size, own.vocab_size, eps, tied=False)
    oracle.add_depth(spec, stated["attn_res"])
    norms = (*(site.norm for site in sites), "norm")
    return model(own, norms, spec, oracle.read_weights(folder), stated=stated)


load = partial(read, Ring, "deepseek_v3", SAME)  # of a folder
