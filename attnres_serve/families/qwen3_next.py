"""Qwen3-Next: layers of Gated DeltaNet and of gated attention, and experts with a shared one.

Its norms multiply by 1 + weight.
"""

from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks, delta_net, head_checks, heads, hugging_face
from attnres_serve.families.family import FURTHER, Config
from attnres_serve.families.limits import Limit

KINDS = ("linear_attention", "full_attention")
INTERVAL = "full_attention_interval"  # of older files: every fourth layer has full attention
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
EXPERTS = (
    *("num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
STATED = (*hugging_face.STATED, "intermediate_size", *LINEAR, *EXPERTS)


def both_kinds(name: str, config: Config) -> None:
    """Raise CheckpointError unless layers of both kinds occur, as vLLM's class needs."""
    interval: Any = config.get(INTERVAL, 4)
    if not is_count(interval):
        raise CheckpointError(f"{INTERVAL} is {interval!r}; expected a number of layers.")
    layers = config["num_hidden_layers"]
    layer_types = config.get("layer_types")
    if layer_types is None:
        layer_types = [KINDS[layer % interval == interval - 1] for layer in range(layers)]
    if {*layer_types} != {*KINDS}:
        raise CheckpointError(
            f"all {layers} layers have {layer_types[0]} by layer_types or {INTERVAL}; {name} needs "
            f"layers of {' and '.join(KINDS)}."
        )


def experts(name: str, config: Config) -> None:
    """Raise CheckpointError unless a layer has experts, and enough for a token's choice."""
    count, chosen = config["num_experts"], config["num_experts_per_tok"]
    if chosen > count:
        raise CheckpointError(f"num_experts_per_tok is {chosen}, and num_experts {count}.")
    step: Any = config.get("decoder_sparse_step", 1)
    dense: Any = config.get("mlp_only_layers") or []
    if not is_count(step):
        raise CheckpointError(f"decoder_sparse_step is {step!r}; expected a number of layers.")
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"mlp_only_layers is {dense!r}; expected a list of layers.")
    layers = range(config["num_hidden_layers"])
    if all(layer in dense or (layer + 1) % step for layer in layers):
        raise CheckpointError(
            f"no layer has experts by mlp_only_layers {dense!r} and decoder_sparse_step {step}; "
            f"vLLM's {name} needs one."
        )


def state(config: Config, width: int) -> int:
    """Bytes of a layer's state, which vLLM keeps in the activations' type by default."""
    matrix = config["linear_key_head_dim"] * config["linear_value_head_dim"]
    return int(config["linear_num_value_heads"] * matrix * width)


FAMILY = hugging_face.family(
    "qwen3_next",
    title="Qwen3-Next",
    module="vllm.model_executor.models.qwen3_next",
    cls="Qwen3NextForCausalLM",
    limits=frozenset(
        {Limit.SEQUENCE_PARALLEL, Limit.BOTH_CACHES, Limit.EXPERTS, Limit.LINEAR_ATTENTION}
        | {Limit.ADAPTERS_OF_WORKERS}
    ),
    stated=STATED,
    draft=heads.QWEN,
    also=(INTERVAL, FURTHER),
    # vLLM's class has no biases in attention, and never ties.
    only={"attention_bias": (False,), "tie_word_embeddings": (False,)},
    more_checks=(
        checks.unquantized,
        head_checks.stated,
        both_kinds,
        delta_net.linear_heads,
        delta_net.convolution,
        experts,
    ),
    kinds=KINDS,
    rotates_part=True,
    recurrent_bytes=state,
)
