"""Ring-linear and Ling 2.5: lightning attention, latent attention, and experts by a sigmoid.

Hugging Face has no class for it: its facts come from vLLM's class.
"""

from collections.abc import Callable
from typing import Any

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks, expert_checks, hugging_face, idle_experts, latent, rotary
from attnres_serve.families.family import BAILING_EMBEDDING, HEAD, Config, Family, Shape
from attnres_serve.families.limits import Limit

ROW = latent.ROW
GROUP = "layer_group_size"  # the last layer of a group has full attention
DENSE, ROTATED = "first_k_dense_replace", "rotary_dim"
STATED = (
    *hugging_face.STATED,
    *("intermediate_size", "num_attention_heads", "head_dim", *ROW, "qk_nope_head_dim"),
    *("v_head_dim", GROUP, "group_norm_size", "num_experts", "num_experts_per_tok"),
    *("num_shared_experts", "moe_intermediate_size", "n_group", "topk_group"),
)
NUMBERS = ("rope_theta", "partial_rotary_factor", "routed_scaling_factor")
# Values with which vLLM's class was run; the first is what a missing key means.
ONLY: dict[str, tuple[Any, ...]] = {
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "norm_head": (False,),
    "use_rmsnorm": (True,),
    "linear_rope": (True,),
    "linear_silu": (False,),
    "use_linear_silu": (False,),
    "router_dtype": ("fp32", None),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
    "rope_interleave": (True,),
    "tie_word_embeddings": (False,),
    # vLLM norms latents by it; other code for latent attention always takes this value.
    "rms_norm_eps": (latent.EPS,),
    "moe_shared_expert_intermediate_size": (None,),
}
# Without them vLLM's class computes another function than the model's training code.
ALWAYS = {
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
UNREAD = (
    *("block", "embedding_dropout", "output_dropout", "use_cache"),
    *("num_nextn_predict_layers", "mtp_loss_scaling_factor", "seq_aux", "topk_method", "scale_ep"),
)
KEYS = (*STATED, *NUMBERS, *ONLY, *ALWAYS, *UNREAD, DENSE, "num_key_value_heads", "q_lora_rank")
KEYS += ("hidden_act", "qk_head_dim", ROTATED)
FUSED = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def sizes(name: str, config: Config) -> None:
    """Raise CheckpointError for missing sizes, and for sizes that make no whole layers."""
    checks.require_counts(config, STATED)
    latent.heads(name, config)
    numbers(name, config)
    layers, group = config["num_hidden_layers"], config[GROUP]
    if group < 2 or layers % group:
        raise CheckpointError(
            f"{GROUP} is {group} and num_hidden_layers {layers}; expected whole groups, of at "
            "least 2 layers."
        )
    rank: Any = config.get("q_lora_rank")
    if rank is not None and not is_count(rank):
        raise CheckpointError(f"q_lora_rank is {rank!r}; expected null or a whole number.")
    heads = config["num_attention_heads"]
    if heads % config["group_norm_size"]:
        raise CheckpointError(
            f"num_attention_heads {heads} is not divisible by group_norm_size "
            f"{config['group_norm_size']}."
        )


def numbers(name: str, config: Config) -> None:
    """Raise CheckpointError for invalid numbers that Ling 2 has too, or two rotated sizes."""
    for key in NUMBERS:
        if not is_number(config.get(key)) or config[key] <= 0:
            raise CheckpointError(f"{key} is {config.get(key)!r}; expected a positive number.")
    dense: Any = config.get(DENSE)
    if type(dense) is not int or dense < 0:
        raise CheckpointError(f"{DENSE} is {dense!r}; expected a number of layers, from 0.")
    size = int(config["head_dim"] * config[rotary.PART])
    if config.get(ROTATED, size) != size:
        raise CheckpointError(
            f"{ROTATED} is {config[ROTATED]!r}; expected {size} as head_dim and {rotary.PART} of "
            f"{name} have it, or no such key."
        )


def is_linear(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config[GROUP])


def shapes(config: Config) -> dict[str, Shape]:
    """The shape of every tensor, by the names of its checkpoints."""
    sizes("bailing_hybrid", config)
    return decoder(
        config,
        lambda layer: _lightning(config) if is_linear(config, layer) else _latent(config),
    )


def decoder(config: Config, attention: Callable[[int], dict[str, Shape]]) -> dict[str, Shape]:
    """Shapes of a whole model; ``attention`` gives those of one layer's attention weights."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    model_shapes: dict[str, Shape] = {
        BAILING_EMBEDDING: (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        HEAD: (vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        second = mlp(config) if layer < config[DENSE] else experts(config)
        parts = {f"attention.{name}.weight": shape for name, shape in attention(layer).items()}
        parts |= {f"mlp.{name}": shape for name, shape in second.items()}
        parts |= dict.fromkeys(
            ("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,)
        )
        model_shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return model_shapes


def _lightning(config: Config) -> dict[str, Shape]:
    hidden, head = config["hidden_size"], config["head_dim"]
    inner = config["num_attention_heads"] * head
    return {
        "query_key_value": (3 * inner, hidden),
        "query_layernorm": (head,),
        "key_layernorm": (head,),
        "g_proj": (inner, hidden),
        "g_norm": (inner,),
        "dense": (hidden, inner),
    }


def _latent(config: Config) -> dict[str, Shape]:
    hidden, heads, rank = (config[key] for key in ("hidden_size", "num_attention_heads", ROW[0]))
    nope, rope, values = (config[key] for key in ("qk_nope_head_dim", ROW[1], "v_head_dim"))
    queries = heads * (nope + rope)
    latent_shapes: dict[str, Shape] = {
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + values), rank),
        "dense": (hidden, heads * values),
    }
    if (low := config.get("q_lora_rank")) is None:
        return latent_shapes | {"q_proj": (queries, hidden)}
    return latent_shapes | {
        "q_a_proj": (low, hidden),
        "q_a_layernorm": (low,),
        "q_b_proj": (queries, low),
    }


def mlp(config: Config, width: str = "intermediate_size", times: int = 1) -> dict[str, Shape]:
    """Shapes of one MLP with ``times`` the channels stated under the key ``width``."""
    hidden, inner = config["hidden_size"], times * config[width]
    return {
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    }


def experts(config: Config) -> dict[str, Shape]:
    """Shapes of a layer's experts, including shared ones and the router."""
    count, width = config["num_experts"], "moe_intermediate_size"
    shared = mlp(config, width, config["num_shared_experts"])
    expert_shapes = {f"shared_experts.{name}": shape for name, shape in shared.items()}
    for expert in range(count):
        one = mlp(config, width)
        expert_shapes |= {f"experts.{expert}.{name}": shape for name, shape in one.items()}
    return expert_shapes | {
        "gate.weight": (count, config["hidden_size"]),
        "gate.expert_bias": (count,),
    }


def state_bytes(config: Config, width: int) -> int:
    """Bytes of one square matrix for every head in every layer of lightning attention."""
    layers = sum(is_linear(config, layer) for layer in range(config["num_hidden_layers"]))
    return int(layers * config["num_attention_heads"] * config["head_dim"] ** 2 * width)


FAMILY = Family(
    name="bailing_hybrid",
    title="Ring-linear",
    module="vllm.model_executor.models.bailing_moe_linear",
    cls="BailingMoeV25ForCausalLM",
    listed="BailingMoeV2_5ForCausalLM",
    # docs/build/upstream/lightning-prefill.md
    limits=frozenset(
        {Limit.DRAFTS, Limit.LIGHTNING, Limit.LINEAR_ATTENTION}
        | {Limit.SHOWN_LAYERS, Limit.ADAPTERS, Limit.PREFIX_CACHING, Limit.STOCK_ON_CPU}
    ),
    config_class="attnres_serve.model.bailing:BailingHybridConfig",
    hf="bailing_hybrid",
    has_hf_class=False,
    keys=lambda: KEYS,
    shapes=shapes,
    checks=(
        sizes,
        hugging_face.only_values(ONLY),
        latent.stated(ALWAYS),
        checks.values,
        expert_checks.groups("num_experts"),
        checks.unquantized,
    ),
    window=None,
    cache_elements=lambda config: (
        latent.head_size(config) * (config["num_hidden_layers"] // config[GROUP])
    ),
    state_bytes=state_bytes,
    idle_elements=lambda config: idle_experts.elements(
        shapes(config), config["num_experts_per_tok"]
    ),
    fused=FUSED,
    is_latent=True,
    usual_eps=None,
    head_size=latent.head_size,
)
