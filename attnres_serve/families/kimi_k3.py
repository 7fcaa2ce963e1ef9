"""Additions of Kimi K3 to Kimi Linear: gates, an activation, and experts that read a latent.

Hugging Face's class of Kimi Linear has none of it.
"""

import re
from typing import Any

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Config, Shape

FULL_RANK, BOUND = GATES = ("use_full_rank_gate", "gate_lower_bound")  # of linear attention
OUTPUT_GATE = "mla_use_output_gate"
ACTIVATION = "situ"
BETAS = ("activation_situ_beta", "activation_situ_linear_beta")
LATENT, LATENT_NORM = "routed_expert_hidden_size", "latent_moe_use_norm"
KEYS = (OUTPUT_GATE, *BETAS, LATENT, LATENT_NORM)
LOWEST = -5.0  # vLLM's layer has no lower one
_EXPERT = re.compile(r"(?P<moe>.+\.block_sparse_moe\.)experts\.\d+\.(?P<part>w[123])\.weight")


def check(name: str, config: Config) -> None:
    """Raise CheckpointError for values that vLLM's class does not support."""
    linear = config["linear_attn_config"]
    for key, place in ((FULL_RANK, linear), (OUTPUT_GATE, config), (LATENT_NORM, config)):
        if place.get(key) not in (None, False, True):
            raise CheckpointError(f"{key} is {place[key]!r}; expected true or false.")
    bound: Any = linear.get(BOUND)
    if bound is not None and (not is_number(bound) or not LOWEST <= bound < 0):
        raise CheckpointError(
            f"{BOUND} is {bound!r}; expected null or a number from {LOWEST} to below 0."
        )
    if config.get(LATENT) is not None and not is_count(config[LATENT]):
        raise CheckpointError(
            f"{LATENT} is {config[LATENT]!r}; expected null or a whole number of at least 1."
        )
    is_situ = config.get("hidden_act") == ACTIVATION
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
    """Shapes of a model's tensors with Kimi K3's additions, from those without.

    Args:
        config: its config.json.
        kinds: of every layer.
        usual: shapes by names.
    """
    with_k3, hidden, linear = dict(usual), config["hidden_size"], config["linear_attn_config"]
    for layer, kind in enumerate(kinds):
        attention = f"model.layers.{layer}.self_attn."
        if kind == "full_attention":
            width = config["num_attention_heads"] * config["v_head_dim"]
            if config.get(OUTPUT_GATE):
                with_k3[f"{attention}g_proj.weight"] = (width, hidden)
        elif linear.get(FULL_RANK):
            width, _ = with_k3.pop(f"{attention}g_b_proj.weight")
            del with_k3[f"{attention}g_a_proj.weight"]
            with_k3[f"{attention}g_proj.weight"] = (width, hidden)
            with_k3[f"{attention}A_log"] = (linear["num_heads"],)
    if config.get(LATENT) is not None:
        with_k3 |= _on_latents(config, with_k3)
    return with_k3


def _on_latents(config: Config, usual: dict[str, Shape]) -> dict[str, Shape]:
    """Shapes of experts that read a latent, and of the layers around them."""
    hidden, latent, width = config["hidden_size"], config[LATENT], config["moe_intermediate_size"]
    latent_shapes: dict[str, Shape] = {}
    for name in usual:
        if expert := _EXPERT.fullmatch(name):
            latent_shapes[name] = (latent, width) if expert["part"] == "w2" else (width, latent)
            latent_shapes[f"{expert['moe']}routed_expert_down_proj.weight"] = (latent, hidden)
            latent_shapes[f"{expert['moe']}routed_expert_up_proj.weight"] = (hidden, latent)
            if config.get(LATENT_NORM):
                latent_shapes[f"{expert['moe']}routed_expert_norm.weight"] = (latent,)
    return latent_shapes
