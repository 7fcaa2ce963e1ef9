"""FLA's Gated DeltaNet: a recurrence with a decay for each head in every layer.

Hugging Face has no class for it: its facts come from FLA's class.
"""

from typing import Any

from attnres_serve.families import delta_net
from attnres_serve.families.family import Config, Shape
from attnres_serve.families.limits import Limit

KEYS, VALUES = "linear_num_key_heads", "linear_num_value_heads"
KEY, VALUE = "linear_key_head_dim", "linear_value_head_dim"
GATE = "output_gate_type"
ONLY: dict[str, tuple[Any, ...]] = {GATE: ("silu", "sigmoid")}


def layer(config: Config) -> dict[str, Shape]:
    """Shapes of a layer's recurrence, by their names in it."""
    hidden, heads = config["hidden_size"], config[VALUES]
    keys, values = config[KEYS] * config[KEY], heads * config[VALUE]
    channels = {"q": keys, "k": keys, "v": values}
    return {
        "A_log": (heads,),
        "dt_bias": (heads,),
        "o_norm.weight": (config[VALUE],),
        "o_proj.weight": (hidden, values),
        **{f"{part}_proj.weight": (heads, hidden) for part in "ab"},
        **{f"{part}_proj.weight": (rows, hidden) for part, rows in channels.items()},
        "g_proj.weight": (values, hidden),
        **delta_net.convolutions(config, channels),
    }


def state(config: Config, width: int) -> int:
    """Bytes of a layer's state in float32, like in FLA's class."""
    return int(config[VALUES] * config[KEY] * config[VALUE] * 4)


FAMILY = delta_net.family(
    "gated_deltanet",
    title="Gated DeltaNet",
    cls="GatedDeltaNetForCausalLM",
    limits=frozenset({Limit.DRAFTS, Limit.LINEAR_ATTENTION, Limit.ADAPTERS, Limit.SHOWN_LAYERS}),
    config_class="attnres_serve.model.delta_config:GatedDeltaNetConfig",
    stated=(KEYS, VALUES, KEY, VALUE),
    only=ONLY,
    more_checks=(delta_net.linear_heads,),
    layer=layer,
    state=state,
    has_float32_states=True,
    fused=(("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj")),
)
