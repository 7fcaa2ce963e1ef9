"""AFMoE: windows with rotary embedding, gates on attention, and experts chosen with a bias."""

from typing import Any

from attnres_serve.depth.spec import is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families import expert_checks, head_checks, hugging_face
from attnres_serve.families.family import Config
from attnres_serve.families.limits import Limit

# How experts are chosen: fixed in Hugging Face's class, read from config.json by vLLM's.
ROUTING = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
LEAST = {"num_dense_layers": 0, "num_experts_per_tok": 1, "num_shared_experts": 1}


def state_routing(config: Any) -> None:
    """State how experts are chosen, which vLLM's class needs."""
    for key, value in ROUTING.items():
        setattr(config, key, value)


def experts(name: str, config: Config) -> None:
    """Raise CheckpointError for numbers of experts that one of the classes cannot run."""
    for key, least in LEAST.items():
        count: Any = config.get(key, least)
        if type(count) is not int or count < least:
            raise CheckpointError(
                f"{key} is {count!r}; {name} needs a whole number of at least {least}."
            )
    if config.get("num_experts_per_tok", 6) > config.get("num_experts", 64):
        raise CheckpointError(
            f"num_experts is {config.get('num_experts', 64)!r}, fewer than a token is to see by "
            f"num_experts_per_tok, {config.get('num_experts_per_tok', 6)!r}."
        )
    if not is_number(scale := config.get("route_scale", 1.0)):
        raise CheckpointError(f"route_scale is {scale!r}; expected a number.")


FAMILY = hugging_face.family(
    "afmoe",
    title="AFMoE",
    module="vllm.model_executor.models.afmoe",
    cls="AfmoeForCausalLM",
    limits=frozenset({Limit.EXPERTS}),
    norms=("input_layernorm", "pre_mlp_layernorm"),
    also=tuple(ROUTING),
    only={key: (value,) for key, value in ROUTING.items()}
    # vLLM's class has no biases and never ties.
    | {"attention_bias": (False,), "tie_word_embeddings": (False,)},
    kinds=("sliding_attention", "full_attention"),
    more_checks=(head_checks.stated, expert_checks.groups("num_experts"), experts),
    adapt=state_routing,
)
