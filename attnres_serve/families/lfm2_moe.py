"""LFM2-MoE: short convolutions between layers of attention, and experts."""

from attnres_serve.errors import CheckpointError
from attnres_serve.families import expert_checks, head_checks, hugging_face
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit


def stated_kinds(name: str, config: Config) -> None:
    """Raise CheckpointError without ``layer_types``, which both classes need."""
    if config.get("layer_types") is None:
        raise CheckpointError(
            f"layer_types is missing; {name} needs it, 'conv' or 'full_attention' for each layer."
        )


FAMILY = hugging_face.family(
    "lfm2_moe",
    title="LFM2-MoE",
    module="vllm.model_executor.models.lfm2_moe",
    cls="Lfm2MoeForCausalLM",
    limits=frozenset({Limit.DRAFTS, Limit.BOTH_CACHES, Limit.EXPERTS, Limit.SHOWN_LAYERS}),
    norms=("operator_norm", "ffn_norm"),
    final_norm="embedding_norm",
    eps="norm_eps",
    also=("head_dim", "tie_embedding"),
    # vLLM's class ties always.
    only={"tie_word_embeddings": (True,), "tie_embedding": (True,)},
    more_checks=(
        head_checks.fixed,
        stated_kinds,
        expert_checks.some("num_dense_layers", usual=2),
    ),
    kinds=("conv", "full_attention"),
)
