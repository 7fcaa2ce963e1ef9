"""GLM-4-MoE: GLM-4.5 and its like."""

from attnres_serve.families import expert_checks, head_checks, heads, hugging_face
from attnres_serve.families.limits import Limit

FAMILY = hugging_face.family(
    "glm4_moe",
    title="GLM-4-MoE",
    module="vllm.model_executor.models.glm4_moe",
    cls="Glm4MoeForCausalLM",
    draft=heads.BEHIND,
    limits=frozenset({Limit.EXPERTS, Limit.SHOWN_LAYERS}),
    also=("head_dim",),
    only={"tie_word_embeddings": (False,)},  # vLLM's class never ties
    more_checks=(
        head_checks.stated,
        expert_checks.groups("n_routed_experts"),
        expert_checks.some("first_k_dense_replace", usual=1),
    ),
    rotates_part=True,
)
