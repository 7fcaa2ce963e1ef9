"""EXAONE-MoE: layers with windows and rotary embedding, others with neither."""

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import expert_checks, heads, hugging_face
from attnres_serve.families.family import Config

_KINDS = ("sliding_attention", "full_attention")


def _windows(name: str, config: Config) -> None:
    """Raise CheckpointError unless both classes rotate the same layers.

    With a configured window, Hugging Face's class does not rotate layers of full attention; vLLM's
    class does not if any layer has a window.
    """
    kinds = config.get("layer_types")
    if kinds is None or _KINDS[0] not in kinds:
        raise CheckpointError(
            f"layer_types is {kinds!r}; supported on {name} is a list with sliding_attention for "
            "at least one layer."
        )
    if not is_count(config.get("sliding_window", 4096)):
        raise CheckpointError(
            f"sliding_window is {config['sliding_window']!r}; {name} needs a number of tokens."
        )


FAMILY = hugging_face.family(
    "exaone_moe",
    title="EXAONE-MoE",
    module="vllm.model_executor.models.exaone_moe",
    cls="ExaoneMoeForCausalLM",
    draft=heads.MTP,
    also=("head_dim", "num_nextn_predict_layers"),
    kinds=_KINDS,
    more_checks=(_windows, expert_checks.groups("num_experts")),
)
