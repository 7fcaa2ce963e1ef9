"""DeepSeek-V2: latent attention, and experts by a softmax."""

from attnres_serve.errors import CheckpointError
from attnres_serve.families import hugging_face, latent
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit


def _one_group(name: str, config: Config) -> None:
    """Raise CheckpointError for several groups with greedy: vLLM uses them in any case."""
    groups = config.get("n_group")
    if config.get("topk_method", "greedy") == "greedy" and groups != 1:
        raise CheckpointError(
            f"n_group is {groups!r} and topk_method 'greedy', with which Hugging Face's {name} has "
            "no groups and vLLM's has: n_group must be 1, or topk_method 'group_limited_greedy'."
        )


FAMILY = hugging_face.family(
    "deepseek_v2",
    title="DeepSeek-V2",
    module="vllm.model_executor.models.deepseek_v2",
    cls="DeepseekV2ForCausalLM",
    limits=frozenset({Limit.FLOAT16, Limit.SEQUENCE_PARALLEL, Limit.SHOWN_LAYERS}),
    is_latent=True,
    also=("moe_layer_freq", "scoring_func"),
    # Hugging Face's class does not normalise the weights of experts.
    only=latent.ONLY
    | {
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    more_checks=(_one_group, latent.expert_groups(smallest=1)),
)
