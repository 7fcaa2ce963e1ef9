"""gpt-oss: attention sinks, windows in every other layer, and experts whose weights are stacked."""

from attnres_serve.errors import CheckpointError
from attnres_serve.families import head_checks, hugging_face
from attnres_serve.families.family import Config

_KINDS = ("sliding_attention", "full_attention")  # by vLLM's class of even layers and of odd ones
_YARN = ("beta_fast", "beta_slow")  # beside what every yarn needs


def _windows(name: str, config: Config) -> None:
    """Raise CheckpointError unless layers alternate like in vLLM's class, which reads no kinds."""
    layers = config["num_hidden_layers"]
    kinds = [_KINDS[layer % 2] for layer in range(layers)]
    if config.get("layer_types") not in (None, kinds):
        raise CheckpointError(
            f"layer_types is {config['layer_types']!r}; vLLM's {name} has {kinds} always."
        )


def _yarn(name: str, config: Config) -> None:
    """Raise CheckpointError for another rotary embedding than that of vLLM's class."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key)
    if rope is None:
        return  # both classes assume that of the released models
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn" or any(rope.get(stated) is None for stated in _YARN):
        raise CheckpointError(
            f"{key} is {rope!r}; vLLM's {name} has the type 'yarn' always, with "
            f"{' and '.join(_YARN)} stated."
        )


def _unquantized(name: str, config: Config) -> None:
    if quantization := config.get("quantization_config"):
        raise CheckpointError(
            f"quantization_config is {quantization!r}; {name} is served with weights in bfloat16, "
            "float16 or float32 only, so save the model dequantized."
        )


FAMILY = hugging_face.family(
    "gpt_oss",
    title="gpt-oss",
    module="vllm.model_executor.models.gpt_oss",
    cls="GptOssForCausalLM",
    # Fixed in vLLM's class and its experts.
    only={
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        "tie_word_embeddings": (False,),
    },
    kinds=_KINDS,
    more_checks=(head_checks.stated, _windows, _yarn, _unquantized),
    usual_eps=1e-5,
    has_fixed_eps=True,
    limits=frozenset(),
)
