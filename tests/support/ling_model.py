"""Ling 2 in float64: Hugging Face's GLM-4-MoE, which computes the same by other names."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tiny_sites
from ring_model import RENAMED
from torch import Tensor

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import Rewritten, hugging_face

SAME = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok", "n_group"),
    *("topk_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace"),
    *("partial_rotary_factor", "rope_theta", "rms_norm_eps", "vocab_size", "use_qk_norm"),
    *("max_position_embeddings", "tie_word_embeddings"),
)
HEAD_NORMS = (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"))


@dataclass
class Ling(Rewritten):
    """Such a checkpoint; ``stated`` is its config.json."""

    stated: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def hf(self) -> Any:
        depth = oracle.depth_shapes(self.spec)
        weights: dict[str, Tensor] = {}
        keys = self.stated["num_key_value_heads"] * self.stated["head_dim"]
        for name, tensor in self.weights.items():
            if name in depth:
                continue
            for old, new in (*RENAMED, *HEAD_NORMS):
                name = name.replace(old, new)
            stem, fused, leaf = name.partition("query_key_value")
            if fused:
                parts = tensor.split((len(tensor) - 2 * keys, keys, keys))
                weights |= {f"{stem}{x}_proj{leaf}": y for x, y in zip("qkv", parts, strict=True)}
            else:
                weights[name] = tensor
        return hugging_face.build(self.config, weights)


def load(folder: Path) -> Ling:
    """A checkpoint of the house format in float64."""
    stated = json.loads((folder / "config.json").read_text())
    experts = {
        "n_routed_experts": stated["num_experts"],
        "n_shared_experts": stated["num_shared_experts"],
    }
    own = hugging_face.config("glm4_moe", {key: stated[key] for key in SAME} | experts)
    sites = tiny_sites.sites_of("bailing_moe", stated["num_hidden_layers"])
    names = oracle.depth_names("attention", "mlp")
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    eps = stated["rms_norm_eps"]
    spec = oracle.Spec(names, layout, {}, own.hidden_size, own.vocab_size, eps, tied=False)
    oracle.add_depth(spec, stated["attn_res"])
    norms = (*(site.norm for site in sites), "norm")
    return Ling(own, norms, spec, oracle.read_weights(folder), stated=stated)
