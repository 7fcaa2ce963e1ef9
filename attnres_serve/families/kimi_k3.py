"""What Kimi K3 has beside Kimi Linear, as far as it is served: gates, and its activation.

Hugging Face's class of Kimi Linear has none of it, and a model with experts on a latent is not
served.
"""

from typing import Any

from attnres_serve.depth.spec import is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Config, Shape

FULL_RANK, BOUND = GATES = ("use_full_rank_gate", "gate_lower_bound")  # of linear attention
OUTPUT_GATE = "mla_use_output_gate"
ACTIVATION = "situ"
BETAS = ("activation_situ_beta", "activation_situ_linear_beta")
KEYS = (OUTPUT_GATE, *BETAS)
LOWEST = -5.0  # that vLLM's layer has


def check(name: str, config: Config) -> None:
    """Raise CheckpointError for values that vLLM's class does not have."""
    linear = config["linear_attn_config"]
    for key, place in ((FULL_RANK, linear), (OUTPUT_GATE, config)):
        if place.get(key) not in (None, False, True):
            raise CheckpointError(f"{key} is {place[key]!r}; expected true or false.")
    bound: Any = linear.get(BOUND)
    if bound is not None and (not is_number(bound) or not LOWEST <= bound < 0):
        raise CheckpointError(
            f"{BOUND} is {bound!r}; expected null or a number from {LOWEST} to below 0."
        )
    is_situ = config.get("hidden_act") == ACTIVATION
    if is_situ and config.get("num_experts") is not None:
        raise CheckpointError(
            f"hidden_act is {ACTIVATION!r} beside num_experts {config['num_experts']!r}; on {name} "
            "it is supported without experts alone, for which vLLM has no kernel of it on a CPU."
        )
    for key in BETAS:
        beta: Any = config.get(key)
        is_needed = is_situ and key == BETAS[0]
        if (beta is None and is_needed) or (
            beta is not None and not (is_situ and is_number(beta) and beta > 0)
        ):
            raise CheckpointError(
                f"{key} is {beta!r} beside hidden_act {config.get('hidden_act')!r}; expected a "
                f"positive number with {ACTIVATION!r}, and none with another."
            )


def shapes(config: Config, kinds: list[str], usual: dict[str, Shape]) -> dict[str, Shape]:
    """The tensors of a model with these gates, from those of one without.

    Args:
        config: its config.json.
        kinds: of every layer.
        usual: shapes by names.
    """
    found, hidden, linear = dict(usual), config["hidden_size"], config["linear_attn_config"]
    for layer, kind in enumerate(kinds):
        attention = f"model.layers.{layer}.self_attn."
        if kind == "full_attention":
            width = config["num_attention_heads"] * config["v_head_dim"]
            if config.get(OUTPUT_GATE):
                found[f"{attention}g_proj.weight"] = (width, hidden)
        elif linear.get(FULL_RANK):
            width, _ = found.pop(f"{attention}g_b_proj.weight")
            del found[f"{attention}g_a_proj.weight"]
            found[f"{attention}g_proj.weight"] = (width, hidden)
            found[f"{attention}A_log"] = (linear["num_heads"],)
    return found
