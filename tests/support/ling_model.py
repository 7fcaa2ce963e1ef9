"""Ling 2 in float64: Hugging Face's GLM-4-MoE, which computes the same by other names."""

from functools import cached_property, partial
from typing import Any

from ring_model import RENAMED, Judge, read
from torch import Tensor

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import hugging_face

SAME = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok", "n_group"),
    *("topk_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace"),
    *("partial_rotary_factor", "rope_theta", "rms_norm_eps", "vocab_size", "use_qk_norm"),
    *("max_position_embeddings", "tie_word_embeddings"),
)
HEAD_NORMS = (("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"))


class Ling(Judge):
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


load = partial(read, Ling, "glm4_moe", SAME)  # of a folder
