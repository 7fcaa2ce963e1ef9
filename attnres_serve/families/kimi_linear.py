"""Kimi Linear: layers of Kimi Delta Attention, and latent attention without rotary embedding."""

from dataclasses import replace
from typing import Any

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks, hugging_face, kimi_k3, latent
from attnres_serve.families.family import FURTHER, Config, Shape
from attnres_serve.families.limits import Limit

LINEAR = "linear_attn_config"
KINDS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
LINEAR_SIZES = ("head_dim", "num_heads", "short_conv_kernel_size")
STATED = (
    *hugging_face.STATED,
    *("intermediate_size", "num_attention_heads", "qk_nope_head_dim", "v_head_dim"),
)
EXPERTS = ("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size")
DENSE = "first_k_dense_replace"
SCALE = "routed_scaling_factor"
OTHER_NAMES = {
    "model_max_length": "max_position_embeddings",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
}
# Hugging Face's class copies these from linear_attn_config.
COPIES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def kinds(config: Config) -> list[str]:
    """The kind of every layer by ``linear_attn_config``, which counts layers from 1.

    A layer that it does not name, or names twice, has an empty string.
    """
    stated = config[LINEAR]
    layers = range(1, config["num_hidden_layers"] + 1)
    named = [[kind for key, kind in KINDS.items() if layer in stated[key]] for layer in layers]
    return [layer_kinds[0] if len(layer_kinds) == 1 else "" for layer_kinds in named]


def layers(name: str, config: Config) -> None:
    """Raise CheckpointError unless every layer is of one kind, and both kinds occur."""
    stated: Any = config.get(LINEAR)
    if not isinstance(stated, dict) or not all(is_count(stated.get(key)) for key in LINEAR_SIZES):
        raise CheckpointError(
            f"{LINEAR} is {stated!r}; expected an object with {', '.join(LINEAR_SIZES)}, whole "
            "numbers of at least 1."
        )
    count = config["num_hidden_layers"]
    lists: list[Any] = [stated.get(key) for key in KINDS]
    if (
        not all(isinstance(numbers, list) and numbers for numbers in lists)
        or any(not is_count(layer) or layer > count for numbers in lists for layer in numbers)
        or "" in kinds(config)
    ):
        raise CheckpointError(
            f"{' and '.join(f'{key} {stated.get(key)!r}' for key in KINDS)} of {LINEAR} must "
            f"together name each of the {count} layers once, from 1, and each at least one."
        )
    for key, value in stated.items():
        if key not in (*KINDS, *LINEAR_SIZES, *kimi_k3.GATES) and value not in (None, False):
            raise CheckpointError(
                f"{LINEAR} has {key}: {value!r}, which vLLM's {name} does not read; remove it only "
                "if the model was trained without."
            )


def copies(name: str, config: Config) -> None:
    """Raise CheckpointError for keys of Hugging Face's class alone that contradict vLLM's."""
    dense = dense_layers(config)
    expected = {
        "layer_types": kinds(config),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense),
        **{key: config[LINEAR][stated_key] for key, stated_key in COPIES.items()},
    }
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise CheckpointError(
                f"{key} is {config[key]!r}; by {LINEAR} and {DENSE}, which vLLM's {name} reads, it "
                f"is {value!r}: leave it out."
            )


def dense_layers(config: Config) -> int:
    """The number of layers without experts, which come first; all if there are no experts."""
    layers: int = config["num_hidden_layers"]
    return layers if config.get("num_experts") is None else min(layers, config[DENSE])


def experts(name: str, config: Config) -> None:
    """Raise CheckpointError unless both classes can choose experts by groups."""
    if config.get("num_experts") is None:
        return
    checks.require_counts(config, EXPERTS)
    scale: Any = config.get(SCALE)
    if not is_number(scale) or scale <= 0:
        raise CheckpointError(f"{SCALE} is {scale!r}; expected a positive number.")
    if config["num_experts_per_token"] == 1 and config.get("moe_renormalize", True):
        raise CheckpointError(
            "num_experts_per_token is 1 with moe_renormalize true: vLLM and transformers then give "
            "each expert the weight 1, and Kimi's own code its score; state moe_renormalize false "
            "if the model was trained with Kimi's."
        )
    dense: Any = config.get(DENSE)
    if type(dense) is not int or dense < 0:
        raise CheckpointError(f"{DENSE} is {dense!r}; expected a number of layers, from 0.")
    count, chosen = config["num_experts"], config["num_experts_per_token"]
    groups, kept = config.get("num_expert_group", 1), config.get("topk_group", 1)
    if (
        not (is_count(groups) and is_count(kept))
        or count % groups
        or count < 2 * groups
        or kept > groups
        or chosen > kept * count // groups
    ):
        raise CheckpointError(
            f"num_experts {count}, num_expert_group {groups!r}, topk_group {kept!r} and "
            f"num_experts_per_token {chosen} do not go together: groups are of equal size, of at "
            "least 2, and topk_group of them must hold the chosen experts."
        )


def state(config: Config, width: int) -> int:
    """Bytes of one float32 matrix for every head."""
    return int(config[LINEAR]["num_heads"] * config[LINEAR]["head_dim"] ** 2 * 4)


def stand_in(config: Config) -> Config:
    """The config.json without values that Hugging Face's class does not support.

    The padding token may exceed a small vocabulary, and changes no tensor.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    return stated | {"pad_token_id": None, "hidden_act": "silu", DENSE: dense_layers(config)}


def adjust(config: Config, hf_shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Shapes of a checkpoint's tensors: transformers names dense layers like experts."""
    dense = tuple(f"model.layers.{layer}." for layer in range(dense_layers(config)))
    usual = {
        name.replace(".block_sparse_moe.", ".mlp.") if name.startswith(dense) else name: shape
        for name, shape in hf_shapes.items()
    }
    return kimi_k3.shapes(config, kinds(config), usual)


def cache_elements(config: Config) -> int:
    """Elements of the cache for a token: a latent row in every layer of full attention."""
    return latent.head_size(config) * len(config[LINEAR]["full_attn_layers"])


FAMILY = hugging_face.family(
    "kimi_linear",
    title="Kimi Linear",
    module="attnres_serve.model.kimi",
    cls="KimiLinearForCausalLM",
    limits=frozenset(
        {Limit.SEQUENCE_PARALLEL, Limit.LINEAR_ATTENTION, Limit.SHOWN_LAYERS}
        | {Limit.ADAPTERS, Limit.PREFIX_CACHING, Limit.STOCK_ON_CPU}
    ),
    other_names=OTHER_NAMES,
    config_class="attnres_serve.model.kimi_config:KimiLinearConfig",
    stated=STATED,
    kinds=tuple(KINDS.values()),
    activations=("silu", kimi_k3.ACTIVATION),
    also=(
        *("head_dim", "mla_use_nope", "moe_router_activation_func", "use_grouped_topk"),
        *(DENSE, LINEAR, "moe_layer_freq", "topk_method", FURTHER, *kimi_k3.KEYS),
    ),
    only={
        **latent.ONLY,
        "moe_router_activation_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "use_grouped_topk": (True,),
        "output_router_logits": (False,),
    },
    heads=(latent.unrotated_heads,),
    more_checks=(
        latent.stated({"mla_use_nope": True}),
        experts,
        layers,
        copies,
        kimi_k3.check,
        checks.unquantized,
    ),
    recurrent_bytes=state,
    fused=(
        ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
    ),
    stand_in=stand_in,
    adjust=adjust,
    cache_elements=cache_elements,
    head_size=latent.head_size,
)
# Its cached rows are those of latent attention; the checks of rotary embedding do not apply.
FAMILY = replace(FAMILY, is_latent=True)
