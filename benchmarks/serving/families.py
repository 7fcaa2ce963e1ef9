"""Small models of other families than Llama, each with eight blocks or nine."""

from dataclasses import dataclass
from typing import Any

from attnres_serve.families import FAMILIES
from benchmarks.serving.models import LONGEST

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 512,
    "max_position_embeddings": LONGEST,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
# On a CPU the cached row of latent attention has these sizes alone.
LATENT = {
    "kv_lora_rank": 512,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


@dataclass(frozen=True)
class FamilyShape:
    """A model of a family; ``block_size`` in sublayers, ``sizes`` beside those in common."""

    family: str
    layers: int
    block_size: int
    sizes: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """The content of config.json in the house format."""
        family = FAMILIES[self.family]
        own = {"architectures": [family.architecture], "model_type": family.model_type}
        depth = {"attn_res": {"block_size": self.block_size}, "num_hidden_layers": self.layers}
        return {**own, **depth, **COMMON, **self.sizes}


FAMILY_SHAPES = {
    "mixtral-512x8": FamilyShape(
        "mixtral",
        layers=8,
        block_size=2,
        sizes={
            "head_dim": 64,
            "intermediate_size": 1024,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "sliding_window": None,
        },
    ),
    "deepseek_v2-512x8": FamilyShape(
        "deepseek_v2",
        layers=8,
        block_size=2,
        sizes=LATENT
        | {
            "first_k_dense_replace": 1,
            "intermediate_size": 2048,
            "moe_intermediate_size": 256,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 32,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "kimi_linear-512x9": FamilyShape(
        "kimi_linear",
        layers=9,
        block_size=2,
        sizes=LATENT
        | {
            "first_k_dense_replace": 1,
            "intermediate_size": 2048,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 9],
                "head_dim": 128,
                "kda_layers": [1, 2, 3, 5, 6, 7],
                "num_heads": 8,
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True,
            "moe_intermediate_size": 256,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "num_experts": 32,
            "num_experts_per_token": 4,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
        },
    ),
}
