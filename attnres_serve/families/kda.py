"""FLA's Kimi Delta Attention: a recurrence with a decay for each channel in every layer.

Hugging Face has no class for it: its facts come from FLA's class.
"""

from typing import Any

from attnres_serve.depth.spec import is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import delta_net
from attnres_serve.families.family import Config, Shape
from attnres_serve.families.limits import Limit

HEADS, HEAD = "linear_num_key_heads", "linear_key_head_dim"  # the same for values
BOUND, LOWEST = "gate_lower_bound", -5  # vLLM's layer asserts it


def bounded(name: str, config: Config) -> None:
    """Raise CheckpointError for a bound of the decay's logarithm that vLLM does not support."""
    bound: Any = config.get(BOUND)
    if bound is not None and not (is_number(bound) and LOWEST <= bound < 0):
        raise CheckpointError(
            f"{BOUND} is {bound!r}; expected null or a number from {LOWEST} on and below 0, as "
            "vLLM's layer has it."
        )


def layer(config: Config) -> dict[str, Shape]:
    """Shapes of a layer's recurrence, by their names in it."""
    hidden, heads, head = config["hidden_size"], config[HEADS], config[HEAD]
    inner = heads * head
    return {
        "A_log": (heads,),
        "dt_bias": (inner,),
        "o_norm.weight": (head,),
        "o_proj.weight": (hidden, inner),
        "b_proj.weight": (heads, hidden),
        **{f"{part}_proj.weight": (inner, hidden) for part in "qkv"},
        **{f"{part}_a_proj.weight": (head, hidden) for part in "fg"},
        **{f"{part}_b_proj.weight": (inner, head) for part in "fg"},
        "g_b_proj.bias": (inner,),
        **delta_net.convolutions(config, dict.fromkeys("qkv", inner)),
    }


def state(config: Config, width: int) -> int:
    """Bytes of a layer's state, which vLLM keeps in float32 by default."""
    return int(config[HEADS] * config[HEAD] ** 2 * 4)


FAMILY = delta_net.family(
    "kda",
    title="Kimi Delta Attention",
    cls="KDAForCausalLM",
    limits=frozenset(
        {Limit.DRAFTS, Limit.LINEAR_ATTENTION, Limit.EAGER_ON_GPU}
        | {Limit.SHOWN_LAYERS, Limit.ADAPTERS}
    ),
    config_class="attnres_serve.model.delta_config:KDAConfig",
    stated=(HEADS, HEAD),
    only={},
    also=(BOUND,),
    more_checks=(bounded,),
    layer=layer,
    state=state,
    fused=(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),),
)
