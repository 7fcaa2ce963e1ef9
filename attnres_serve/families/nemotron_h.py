"""Nemotron-H: one sublayer per layer: a recurrence, attention or an MLP."""

from math import prod
from typing import Any

from attnres_serve.depth.spec import is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import hugging_face
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit

KINDS = ("linear_attention", "full_attention", "mlp")
LETTERS = "M*-"  # of the same kinds in hybrid_override_pattern
SHORTEST = 1e-6  # a bound without effect; the default of Hugging Face's class is 0.001


def kinds(name: str, config: Config) -> None:
    """Raise CheckpointError unless the kinds of all layers are stated and supported."""
    stated = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in stated if config.get(key) is not None), stated[-1])
    layer_kinds: Any = config.get(key)
    known = LETTERS if key == stated[-1] else KINDS
    right = isinstance(layer_kinds, str if key == stated[-1] else list) and {*layer_kinds} <= {
        *known
    }
    if not right or len(layer_kinds) != config["num_hidden_layers"]:
        raise CheckpointError(
            f"{key} is {layer_kinds!r}; supported on {name} are {config['num_hidden_layers']} of "
            f"{', '.join(known)}, one for each layer of num_hidden_layers."
        )


def time_steps(name: str, config: Config) -> None:
    """Raise CheckpointError if Hugging Face's class would raise short time steps."""
    shortest: Any = config.get("time_step_min", 0.001)
    if not is_number(shortest) or not 0 < shortest <= SHORTEST:
        raise CheckpointError(
            f"time_step_min is {shortest!r}, and Hugging Face's {name} lifts shorter time steps of "
            "a prompt to it, which vLLM does not; where the model was trained without such a "
            f"bound, state {SHORTEST} or less."
        )


def state(config: Config, width: int) -> int:
    """Bytes of a layer's state, which vLLM keeps in float32 by default."""
    sizes = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    return prod(int(config[size]) for size in sizes) * 4


FAMILY = hugging_face.family(
    "nemotron_h",
    title="Nemotron-H",
    module="vllm.model_executor.models.nemotron_h",
    cls="NemotronHForCausalLM",
    limits=frozenset(
        {Limit.DRAFTS, Limit.BOTH_CACHES, Limit.SHOWN_LAYERS}
        | {Limit.ADAPTERS_OF_WORKERS, Limit.PREFIX_CACHING}
    ),
    norms=("norm",),
    final_norm="norm_f",
    eps="layer_norm_epsilon",
    also=("hybrid_override_pattern", "num_hidden_layers"),
    only={
        "attention_bias": (False,),  # of which vLLM's class has none
        "mamba_hidden_act": ("silu",),
        "mlp_hidden_act": ("relu2",),
        "num_nextn_predict_layers": (0,),
        "sliding_window": (None,),
        "tie_word_embeddings": (False,),
    },
    kinds=KINDS,
    more_checks=(kinds, time_steps),
    recurrent_bytes=state,
)
