"""The shapes of models, of Llamas and of other families, each with eight blocks or nine."""

from dataclasses import dataclass
from typing import Any

from attnres_serve.families import FAMILIES

LONGEST = 1024  # tokens of a prompt and its answer
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
class Shape:
    """A model of a family; ``block_size`` in sublayers, ``sizes`` beside those in common."""

    family: str
    layers: int
    block_size: int
    sizes: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """The content of config.json in the house format."""
        family = FAMILIES[self.family]
        names = {"architectures": [family.architecture], "model_type": family.model_type}
        depth = {"attn_res": {"block_size": self.block_size}, "num_hidden_layers": self.layers}
        return {**names, **depth, **COMMON, **self.sizes}


def llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    block_size: int,
    vocab: int = 32000,
) -> Shape:
    sizes = {
        "attention_bias": False,
        "head_dim": hidden // heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": vocab,
    }
    return Shape("llama", layers, block_size, sizes)


LLAMAS = {
    "768x12": llama(768, 12, heads=12, kv_heads=12, intermediate=2048, block_size=3),
    "1024x28": llama(1024, 28, heads=16, kv_heads=8, intermediate=3072, block_size=7),
    # Full AttnRes where it is dearest: narrow and deep.
    "full-256x24": llama(256, 24, 4, kv_heads=2, intermediate=768, block_size=1, vocab=4096),
    "full-1024x16": llama(1024, 16, 16, kv_heads=8, intermediate=3072, block_size=1),
}
QUICK = {"128x4": llama(128, 4, 2, kv_heads=1, intermediate=256, block_size=1, vocab=2048)}
SHAPES = LLAMAS | {
    "mixtral-512x8": Shape(
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
    "deepseek_v2-512x8": Shape(
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
    "kimi_linear-512x9": Shape(
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
