"""Latent attention: checks and sizes that its families share.

All heads read one cached row per token: a normed latent of ``kv_lora_rank`` channels, and
``qk_rope_head_dim`` rotated channels.
"""

from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks
from attnres_serve.families.family import FURTHER, Check, Config

ROW = ("kv_lora_rank", "qk_rope_head_dim")  # what is cached of a token
COMPILED = 512, 64  # the row that vLLM's CPU kernels are compiled for
SCALES = ("mscale", "mscale_all_dim")  # of yarn; vLLM reads them for latent attention alone
# Norms on latents. Hugging Face's classes and DeepSeek's code always take this epsilon there;
# vLLM's class takes rms_norm_eps, which is a known difference
# (https://github.com/vllm-project/vllm/pull/35515).
NORMS, EPS = ("q_a_layernorm", "kv_a_layernorm"), 1e-6
# Values that vLLM's classes have always, or read as Hugging Face's do.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
}


def head_size(config: Config) -> int:
    """Channels of a cached row: the head size of the one key that all queries read."""
    return int(sum(config[key] for key in ROW))


def heads(name: str, config: Config) -> None:
    """Raise CheckpointError for heads that one of the classes cannot have."""
    checks.require_counts(config, ROW)
    unrotated_heads(name, config)


def unrotated_heads(name: str, config: Config) -> None:
    """Like ``heads`` for models without rotary embedding: the shared part may be empty."""
    rank, shared = ROW
    checks.require_counts(config, (rank,))
    width: Any = config.get(shared)
    if type(width) is not int or width < 0:
        raise CheckpointError(f"{shared} is {width!r}; expected a whole number from 0.")
    heads, keys = (config.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if keys != heads:
        raise CheckpointError(
            f"num_key_value_heads is {keys!r}; latent attention has one for each of the "
            f"num_attention_heads, {heads!r}."
        )
    further: Any = config.get(FURTHER) or 0
    if further != 0 and not is_count(further):
        raise CheckpointError(f"{FURTHER} is {further!r}; expected a number of layers.")


def check(name: str, config: Config) -> None:
    """Raise CheckpointError for heads or a rotated part that one of the classes cannot have."""
    heads(name, config)
    rotated = config["qk_rope_head_dim"]
    if rotated % 2:
        raise CheckpointError(
            f"qk_rope_head_dim is {rotated}; rotary embedding needs an even number."
        )
    if config.get("head_dim") not in (None, rotated):
        raise CheckpointError(
            f"head_dim is {config['head_dim']!r}; expected none, or {rotated} as qk_rope_head_dim "
            f"is, which Hugging Face's {name} rotates."
        )
    if config.get("rope_interleave", True) is not True:
        raise CheckpointError(
            f"rope_interleave is {config['rope_interleave']!r}; vLLM's {name} rotates neighbouring "
            "channels alone, so it must be true."
        )


def rope(name: str, config: Config) -> None:
    """Raise CheckpointError for a type that vLLM mistakes for yarn, or only one yarn scale."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise CheckpointError(
            f"{key} is {scaling!r}: vLLM's {name} takes this type for yarn; supported are default "
            "and yarn."
        )
    stated = [scale for scale in SCALES if scaling.get(scale) is not None]
    if kind == "yarn" and len(stated) == 1:
        raise CheckpointError(
            f"{key} is {scaling!r}: it has {stated[0]} alone, from which vLLM and Hugging Face's "
            f"{name} make different scales; supported are both {' and '.join(SCALES)}, or neither."
        )


def stated(values: dict[str, Any]) -> Check:
    """A check that config.json states the values that vLLM would otherwise assume wrongly."""

    def check(name: str, config: Config) -> None:
        for key, value in values.items():
            if (actual := config.get(key)) != value:
                raise CheckpointError(
                    f"{key} is {actual!r}; the code of {name} has {value!r} always, and vLLM must "
                    "be told: config.json must state it."
                )

    return check


def expert_groups(smallest: int) -> Check:
    """A check that both classes can choose experts by groups of at least ``smallest``."""

    def check(name: str, config: Config) -> None:
        keys = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
        checks.require_counts(config, keys)
        experts, chosen, groups, kept = (config[key] for key in keys)
        size = experts // groups
        if experts % groups or size < smallest or kept > groups or chosen > kept * size:
            raise CheckpointError(
                f"n_routed_experts {experts}, n_group {groups}, topk_group {kept} and "
                f"num_experts_per_tok {chosen} do not go together: groups are of equal size, of at "
                f"least {smallest}, and topk_group of them must hold the chosen experts."
            )

    return check
