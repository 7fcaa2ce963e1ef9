"""Mamba2: one sublayer per layer, a recurrence without attention."""

from attnres_serve.errors import CheckpointError
from attnres_serve.families import hugging_face
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit


def one_group(name: str, config: Config) -> None:
    """Raise CheckpointError for several groups, and if none are stated, which means eight."""
    if config.get("n_groups") != 1:
        raise CheckpointError(
            f"n_groups is {config.get('n_groups')!r}; supported on {name} is 1, as vLLM norms "
            "every group by itself, and Hugging Face's class all of them together."
        )


def state(config: Config, width: int) -> int:
    return int(config["num_heads"] * config["head_dim"] * config["state_size"] * width)


FAMILY = hugging_face.family(
    "mamba2",
    title="Mamba2",
    module="vllm.model_executor.models.mamba2",
    cls="Mamba2ForCausalLM",
    limits=frozenset({Limit.DRAFTS, Limit.ADAPTERS, Limit.PREFIX_CACHING, Limit.SHOWN_LAYERS}),
    norms=("norm",),
    final_norm="norm_f",
    eps="layer_norm_epsilon",
    stated=("hidden_size", "num_hidden_layers", "vocab_size"),
    also=("max_position_embeddings", "rms_norm"),
    only={
        "time_step_limit": ([0.0, float("inf")],),
        "rms_norm": (True,),  # neither class reads it; the recurrence has a norm always
    },
    more_checks=(one_group,),
    recurrent_bytes=state,
)
