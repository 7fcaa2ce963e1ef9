"""Ministral 3: Mistral with queries that are scaled beyond the original length."""

from functools import partial
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import hugging_face, rotary
from attnres_serve.families.family import Config

BETA, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
ALSO = (BETA, LENGTH, "max_position_embeddings", "mscale", "mscale_all_dim")


def scaled(name: str, config: Config) -> None:
    """Raise CheckpointError if the scale of queries is not stated."""
    rope: Any = config.get("rope_scaling") or config.get("rope_parameters")
    for key in (BETA, LENGTH) if rope else ():
        if key not in rope:
            raise CheckpointError(
                f"the rotary embedding {rope!r} lacks {key}, without which Hugging Face's {name} "
                "does not run; give it a number."
            )


def state_scale(config: Any) -> None:
    """Set the scale of queries under the key that vLLM's class reads."""
    rope = config.rope_parameters
    config.llama_4_scaling = {LENGTH: rope[LENGTH], "beta": rope[BETA]}


FAMILY = hugging_face.family(
    "ministral3",
    title="Ministral 3",
    module="vllm.model_executor.models.mistral",
    cls="MistralForCausalLM",
    listed="Ministral3ForCausalLM",
    only={"sliding_window": (None,)},
    rope=partial(rotary.check, also=ALSO),
    more_checks=(scaled,),
    adapt=state_scale,
    limits=frozenset(),
)
