"""LFM2: short convolutions between layers of attention."""

from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import head_checks, hugging_face
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit

SIZES = ("conv_dim", "block_dim")  # of vLLM's class; Hugging Face's has hidden_size for both


def one_size(name: str, config: Config) -> None:
    """Raise CheckpointError if sublayers and the residual stream have different sizes."""
    for key in SIZES:
        if config.get(key) not in (None, config["hidden_size"]):
            raise CheckpointError(
                f"{key} is {config[key]!r}; Hugging Face's {name} has hidden_size "
                f"({config['hidden_size']}) in its place, so leave out the key if the model was "
                "trained so."
            )


def state_sizes(config: Any) -> None:
    """Set the sizes that vLLM's class reads."""
    for key in SIZES:
        setattr(config, key, config.hidden_size)


FAMILY = hugging_face.family(
    "lfm2",
    title="LFM2",
    module="vllm.model_executor.models.lfm2",
    cls="Lfm2ForCausalLM",
    limits=frozenset({Limit.DRAFTS, Limit.BOTH_CACHES, Limit.SHOWN_LAYERS}),
    norms=("operator_norm", "ffn_norm"),
    final_norm="embedding_norm",
    eps="norm_eps",
    # Neither class reads block_norm_eps, which many files have.
    also=(*SIZES, "block_ff_dim", "block_norm_eps", "head_dim", "tie_embedding"),
    # vLLM's class ties always.
    only={"tie_word_embeddings": (True,), "tie_embedding": (True,)},
    more_checks=(head_checks.fixed, one_size),
    kinds=("conv", "full_attention"),
    adapt=state_sizes,
)
