"""AliceAI: Qwen3-Next with Kimi Delta Attention in linear layers, and experts by a sigmoid.

Hugging Face has no class for it: its facts come from Qwen3-Next's class, with the differences here.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import (
    checks,
    delta_net,
    head_checks,
    heads,
    hugging_face,
    kda,
    qwen3_next,
    rotary,
)
from attnres_serve.families.family import FURTHER, Config, Shape
from attnres_serve.families.limits import Limit

HEAD = replace(heads.MTP, reads="mixed", keys=("mtp_num_hidden_layers", FURTHER), cls="AliceAIMTP")
STATED = (*hugging_face.STATED, *qwen3_next.LINEAR, *qwen3_next.EXPERTS)
SAME = (
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("linear_value_head_dim", "linear_key_head_dim"),
)
# Fixed values of AliceAI's code, which some of its files state.
ONLY: dict[str, tuple[Any, ...]] = {
    "kda_allow_negative_eigenvalues": (False,),
    "router_score_function": ("sigmoid",),
    "router_bias_correction": (True,),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "decoder_sparse_step": (1,),  # every layer has experts
    "mlp_only_layers": ([], None),
}


def one_size(name: str, config: Config) -> None:
    """Raise CheckpointError unless heads of linear layers have one number and one size."""
    for values, keys in SAME:
        if config[values] != config[keys]:
            raise CheckpointError(
                f"{values} is {config[values]} and {keys} {config[keys]}; the linear layers of "
                f"{name} have one for both."
            )


def stated(name: str, config: Config) -> None:
    """Raise CheckpointError if a default would have to be guessed."""
    if config.get("layer_types") is None:
        raise CheckpointError(
            f"layer_types is missing; {name} needs it, {' or '.join(qwen3_next.KINDS)} for each "
            "layer."
        )
    places = (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    if all(place.get(rotary.PART) is None for place in places):
        raise CheckpointError(
            f"{rotary.PART} is missing; config.json of {name} must state it, 1.0 if whole heads "
            "are rotated."
        )
    for key in HEAD.keys:
        if config.get(key) not in (None, 0) and not is_count(config[key]):
            raise CheckpointError(f"{key} is {config[key]!r}; expected a number of layers.")
    if config["num_experts"] < 2:
        raise CheckpointError("num_experts is 1; a choice needs at least 2.")


def stand_in(config: Config) -> Config:
    """The config.json without its padding token, which may exceed a small vocabulary."""
    return {**config, "pad_token_id": None}


def adjust(config: Config, hf_shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Shapes by names: those of Qwen3-Next, with other linear layers and biases for experts."""
    return dict(_shapes(config, hf_shapes))


def _shapes(config: Config, hf_shapes: dict[str, Shape]) -> Iterator[tuple[str, Shape]]:
    for name, shape in hf_shapes.items():
        layer, is_linear, leaf = name.partition("linear_attn.")
        if not is_linear:
            yield name, shape
        elif leaf == "A_log":  # once a layer
            linear_shapes = kda.layer(config) | {"A_log": (1, 1, config[kda.HEADS], 1)}
            del linear_shapes["g_b_proj.bias"]  # only FLA's layers have it
            for part, linear_shape in linear_shapes.items():
                yield f"{layer}linear_attn.{part}", linear_shape
        if name.endswith(".mlp.gate.weight"):
            yield name.replace("weight", "e_score_correction_bias"), (config["num_experts"],)


def cache_elements(config: Config) -> int:
    """Elements of the cache for a token: keys and values in every layer of full attention."""
    layers = config["layer_types"].count("full_attention")
    return int(2 * layers * config["num_key_value_heads"] * config["head_dim"])


FAMILY = hugging_face.family(
    "alice_ai",
    hf="qwen3_next",
    title="AliceAI",
    module="attnres_serve.model.alice_ai",
    cls="AliceAIForCausalLM",
    # vLLM would shard the adapter of a projection that every worker has whole.
    limits=frozenset(
        {Limit.SEQUENCE_PARALLEL, Limit.BOTH_CACHES, Limit.EXPERTS, Limit.LINEAR_ATTENTION}
        | {Limit.EAGER_ON_GPU, Limit.ADAPTERS}
    ),
    has_hf_class=False,
    treated_as="KimiLinearForCausalLM",
    stated=STATED,
    draft=HEAD,
    also=(*HEAD.keys, *ONLY),
    only=ONLY,
    more_checks=(
        checks.unquantized,
        head_checks.stated,
        stated,
        qwen3_next.both_kinds,
        delta_net.linear_heads,
        delta_net.convolution,
        one_size,
        qwen3_next.experts,
    ),
    kinds=qwen3_next.KINDS,
    rotates_part=True,
    fused=(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"), ("gate_proj", "up_proj")),
    is_stock=False,
    stand_in=stand_in,
    adjust=adjust,
    recurrent_bytes=kda.state,
    cache_elements=cache_elements,
)
