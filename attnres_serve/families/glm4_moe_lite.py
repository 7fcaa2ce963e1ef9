"""GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3's attention and GLM-4-MoE's experts."""

from attnres_serve.errors import CheckpointError
from attnres_serve.families import expert_checks, heads, hugging_face, latent
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit


def _dense_layers(name: str, config: Config) -> None:
    """Check the dense layers: vLLM reads a number, Hugging Face's class a list (default: one)."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace")
    kinds = config.get("mlp_layer_types")
    usual = ["dense"] + ["sparse"] * (layers - 1) if kinds is None else kinds
    if type(dense) is not int or usual != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise CheckpointError(
            f"first_k_dense_replace is {dense!r} and mlp_layer_types is {kinds!r}; vLLM's {name} "
            "reads the first and Hugging Face's the second, by default one dense layer: "
            "config.json must state the first, and both must mean the same layers."
        )


FAMILY = hugging_face.family(
    "glm4_moe_lite",
    title="GLM-4-MoE-Lite",
    module="vllm.model_executor.models.glm4_moe_lite",
    cls="Glm4MoeLiteForCausalLM",
    draft=heads.LITE,
    limits=frozenset({Limit.EXPERTS, Limit.SHOWN_LAYERS}),
    is_latent=True,
    also=("first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers"),
    only=latent.ONLY,
    more_checks=(
        _dense_layers,
        latent.expert_groups(smallest=2),
        expert_checks.some("first_k_dense_replace", usual=1),
    ),
)
