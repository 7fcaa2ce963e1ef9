"""flash-linear-attention's classes with a delta-rule recurrence in every layer."""

from math import isfinite
from typing import Any

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import fla_keys
from attnres_serve.formats.parsed_config import ParsedConfig

OWN_KEYS = frozenset(("head_dim", "conv_size", "expand_v"))
# FLA's kernels; all compute the same function.
MODES = ("chunk", "fused_recurrent")
# By key: the supported value, which a missing key means, and the meaning of other values.
Only = dict[str, tuple[Any, str]]
ONLY: Only = {
    "use_short_conv": (True, "projections without short convolutions"),
    "allow_neg_eigval": (False, "twice the strength of writing"),
    "attn": (None, "layers of attention between those of the recurrence"),
}
GATED: Only = {"use_gate": (True, "outputs without a gate")}
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def gated_deltanet(config: dict[str, Any], name: str) -> ParsedConfig:
    """Parse a config.json of FLA's Gated DeltaNet; ``name`` is the format's."""
    heads, head, values = _sizes(
        config, "gated_deltanet", ONLY | GATED, ("output_gate_activation",)
    )
    value_heads = config.get("num_v_heads") or heads
    if value_heads % heads:
        raise CheckpointError(
            f"num_v_heads {value_heads} is not divisible by num_heads {heads}, as FLA's recurrence "
            "needs."
        )
    gate: Any = config.get("output_gate_activation", "swish")
    if not isinstance(gate, str) or gate not in GATES:
        raise CheckpointError(
            f"output_gate_activation is {gate!r}; expected {' or '.join(map(repr, GATES))}."
        )
    translated = fla_keys.family_config(config) | {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head,
        "linear_value_head_dim": values,
        "linear_conv_kernel_dim": config["conv_size"],
        "output_gate_type": GATES[gate],
    }
    return _translation(config, name, "gated_deltanet", translated)


def kda(config: dict[str, Any], name: str) -> ParsedConfig:
    """Parse a config.json of FLA's Kimi Delta Attention; ``name`` is the format's."""
    heads, head, values = _sizes(config, "kda", ONLY, ("safe_gate", "lower_bound"))
    if config.get("num_v_heads") not in (None, heads):
        raise CheckpointError(
            f"num_v_heads is {config['num_v_heads']} with num_heads {heads}, and vLLM's layer of "
            "Kimi Delta Attention has one number for both; supported is null."
        )
    if values != head:
        raise CheckpointError(
            f"expand_v is {config['expand_v']}, and vLLM's layer of Kimi Delta Attention has one "
            "size of a head for keys and values; supported is 1."
        )
    fla_keys.flags(config, "safe_gate")
    bound = config.get("lower_bound")
    if config.get("safe_gate") and bound is None:
        raise CheckpointError(
            "safe_gate is True and lower_bound is missing; give the bound that the model was "
            "trained with, as FLA's class needs."
        )
    # The bound applies even if safe_gate does not let kernels rely on it.
    translated = fla_keys.family_config(config) | {
        "linear_num_key_heads": heads,
        "linear_key_head_dim": head,
        "linear_conv_kernel_dim": config["conv_size"],
        "gate_lower_bound": bound,
    }
    return _translation(config, name, "kda", translated)


def _sizes(
    config: dict[str, Any], name: str, only: Only, known: tuple[str, ...]
) -> tuple[int, int, int]:
    """The number of heads, and the sizes of a head for keys and for values.

    Raises:
        CheckpointError: the value of a key is not supported, or FLA's class does not have it.
    """
    fla_keys.check(config, (*OWN_KEYS, *only, "attn_mode", "num_v_heads", *known), name)
    fla_keys.counts_or_null(config, "num_v_heads")
    for key in ("head_dim", "conv_size"):
        if not is_count(config[key]):
            raise CheckpointError(f"{key} is {config[key]!r}; expected a whole number.")
    if (mode := config.get("attn_mode", MODES[0])) not in MODES:
        raise CheckpointError(f"attn_mode is {mode!r}; expected {' or '.join(map(repr, MODES))}.")
    for key, (supported, other) in only.items():
        value = config.get(key, supported)
        if type(value) is not type(supported) or value != supported:
            raise CheckpointError(
                f"{key} is {value!r}: {other}, which FLA's {name} may have and is not served with; "
                f"supported is {'null' if supported is None else str(supported).lower()}."
            )
    head, times = config["head_dim"], config["expand_v"]
    if not is_number(times) or not _is_whole(head * times, 1e-5 * head):
        raise CheckpointError(
            f"expand_v is {times!r} with head_dim {head}; expected a number that makes the size of "
            "a head for values, their product, a whole number."
        )
    return config["num_heads"], head, round(head * times)


def _is_whole(product: float, reach: float) -> bool:
    return isfinite(product) and product > 0 and abs(product - round(product)) <= reach


def _translation(
    config: dict[str, Any], name: str, family: str, translated: dict[str, Any]
) -> ParsedConfig:
    layout = FAMILIES[family].layout(translated)
    return ParsedConfig(name, family, translated, fla_keys.spec(config, layout))
