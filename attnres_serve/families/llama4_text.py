"""Llama 4, text alone: layers with chunks and rotary embedding, others with neither."""

from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import head_checks, hugging_face
from attnres_serve.families.family import Config

BLOCK = 128  # tokens in a block of vLLM's cache on CPU, a multiple of those on a GPU
_KINDS = ("chunked_attention", "full_attention")


def _chunks(name: str, config: Config) -> None:
    """Raise CheckpointError unless exactly the layers with rotary embedding have chunks.

    vLLM's class assumes it and does not read ``layer_types``."""
    layers = config["num_hidden_layers"]
    chunk: Any = config.get("attention_chunk_size", 8192)
    if not is_count(chunk) or chunk % BLOCK:
        raise CheckpointError(
            f"attention_chunk_size is {chunk!r}; {name} needs a number of tokens that is divisible "
            f"by {BLOCK}, as vLLM cuts chunks into whole blocks of its cache."
        )
    interval = config.get("no_rope_layer_interval", 4)
    if not is_count(interval):
        raise CheckpointError(
            f"no_rope_layer_interval is {interval!r}; expected a whole number of at least 1."
        )
    rotated: Any = config.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(layers)
    ]
    if (
        not isinstance(rotated, list)
        or len(rotated) != layers
        or any(flag not in (0, 1) for flag in rotated)
    ):
        raise CheckpointError(
            f"no_rope_layers is {rotated!r}; expected a list of {layers} of 0 and 1."
        )
    kinds = [_KINDS[0] if is_rotated else _KINDS[1] for is_rotated in rotated]
    if config.get("layer_types") not in (None, kinds):
        raise CheckpointError(
            f"layer_types is {config['layer_types']!r}; vLLM's {name} has {kinds} by "
            "no_rope_layers."
        )


def _experts(name: str, config: Config) -> None:
    """Raise CheckpointError unless vLLM's class has experts in the same layers."""
    step = config.get("interleave_moe_layer_step", 1)
    if not is_count(step):
        raise CheckpointError(
            f"interleave_moe_layer_step is {step!r}; expected a whole number of at least 1."
        )
    expected = [*range(step - 1, config["num_hidden_layers"], step)]
    if config.get("moe_layers") not in (None, expected):
        raise CheckpointError(
            f"moe_layers is {config['moe_layers']!r}; vLLM's {name} has experts in the layers "
            f"{expected} by interleave_moe_layer_step."
        )


FAMILY = hugging_face.family(
    "llama4_text",
    title="Llama 4",
    module="attnres_serve.model.llama4",
    cls="Llama4ForCausalLM",
    reordered=("q_proj", "k_proj"),
    # vLLM's kernels support weights on the input with one expert only.
    only={"attention_bias": (False,), "num_experts_per_tok": (1,)},
    kinds=_KINDS,
    more_checks=(head_checks.stated, _chunks, _experts),
    usual_eps=1e-5,
    limits=frozenset(),
)
