"""Ling 2 (BailingMoeV2): attention with head norms, and experts by a sigmoid with a bias.

Hugging Face has no class for it: its facts come from vLLM's class.
"""

from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import (
    bailing_hybrid,
    checks,
    expert_checks,
    hugging_face,
    idle_experts,
    latent,
)
from attnres_serve.families.family import Config, Family, Shape

SHARED = "moe_shared_expert_intermediate_size"
STATED = (
    *hugging_face.STATED,
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size"),
    *("n_group", "topk_group"),
)
# Values with which vLLM's class was run; the first is what a missing key means.
ONLY: dict[str, tuple[Any, ...]] = {
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "router_dtype": ("fp32", None),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
    "tie_word_embeddings": (False,),
    "norm_head": (False,),
    "using_split_qkv_in_self_attention": (False,),
}
ALWAYS = bailing_hybrid.ALWAYS | {"use_rmsnorm": True}
KEYS = (*STATED, *ONLY, *ALWAYS, *bailing_hybrid.NUMBERS, *bailing_hybrid.UNREAD)
KEYS += (bailing_hybrid.DENSE, bailing_hybrid.ROTATED, SHARED, "hidden_act", "rms_norm_eps")


def sizes(name: str, config: Config) -> None:
    """Raise CheckpointError for missing sizes, and for shared experts of another size."""
    checks.require_counts(config, STATED)
    bailing_hybrid.numbers(name, config)
    width = config["moe_intermediate_size"]
    if config.get(SHARED, width) != width:
        raise CheckpointError(
            f"{SHARED} is {config[SHARED]!r}; expected {width} as moe_intermediate_size is, or no "
            "such key."
        )


def state_defaults(config: Any) -> None:
    """State what vLLM's class reads without a default."""
    config.use_bias = config.use_qkv_bias = False
    config.embedding_dropout = 0.0


def shapes(config: Config) -> dict[str, Shape]:
    """The shape of every tensor, by the names of its checkpoints."""
    sizes("bailing_moe", config)
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    attention: dict[str, Shape] = {
        "query_key_value": (queries + 2 * keys, hidden),
        "query_layernorm": (head,),
        "key_layernorm": (head,),
        "dense": (hidden, queries),
    }
    return bailing_hybrid.decoder(config, lambda _: attention)


FAMILY = Family(
    name="bailing_moe",
    title="Ling 2",
    module="vllm.model_executor.models.bailing_moe",
    cls="BailingMoeV2ForCausalLM",
    config_class="attnres_serve.model.bailing:BailingMoeConfig",
    hf="bailing_moe",
    has_hf_class=False,
    adapt=state_defaults,
    keys=lambda: KEYS,
    shapes=shapes,
    checks=(
        sizes,
        hugging_face.only_values(ONLY),
        latent.stated(ALWAYS),
        checks.values,
        checks.unquantized,
        checks.groups,
        expert_checks.groups("num_experts"),
    ),
    window=None,
    cache_elements=lambda config: (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    ),
    idle_elements=lambda config: idle_experts.elements(
        shapes(config), config["num_experts_per_tok"]
    ),
    fused=(("gate_proj", "up_proj"),),
    usual_eps=None,
)
