"""FLA families in which every layer has a delta-rule recurrence and a gated MLP."""

from collections.abc import Callable, Mapping
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks, dense, footprint, hugging_face
from attnres_serve.families.family import EMBEDDING, HEAD, Check, Config, Family, Shape

CONVOLUTION = "linear_conv_kernel_dim"
STATED = (*hugging_face.STATED, "intermediate_size", CONVOLUTION)
READ = ("hidden_act", "rms_norm_eps", "tie_word_embeddings")


def linear_heads(name: str, config: Config) -> None:
    """Raise CheckpointError unless value heads divide evenly among the key heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise CheckpointError(
            f"linear_num_value_heads {values} is not divisible by linear_num_key_heads {keys}."
        )


def convolution(name: str, config: Config) -> None:
    """Raise CheckpointError for short convolutions of one token."""
    if config[CONVOLUTION] < 2:
        raise CheckpointError(
            f"{CONVOLUTION} is 1; vLLM keeps the tokens before the newest, so it must be at "
            "least 2."
        )


def convolutions(config: Config, channels: Mapping[str, int]) -> dict[str, Shape]:
    """Shapes of short convolutions; ``channels`` has their numbers by a projection's name."""
    tokens = config[CONVOLUTION]
    return {f"{part}_conv1d.weight": (rows, 1, tokens) for part, rows in channels.items()}


def family(
    name: str,
    *,
    stated: tuple[str, ...],
    only: Mapping[str, tuple[Any, ...]],
    more_checks: tuple[Check, ...],
    layer: Callable[[Config], dict[str, Shape]],
    state: Callable[[Config, int], int],
    fused: tuple[tuple[str, ...], ...],
    also: tuple[str, ...] = (),
    **rest: Any,
) -> Family:
    """A family of this kind.

    Args:
        name: the key in ``FAMILIES``, FLA's model type and the module of its class here.
        stated: the keys of its recurrence that config.json must state, whole numbers.
        only: the supported values of other keys, the one of a missing key first.
        more_checks: checks in addition to the common ones.
        layer: gives the shapes of the tensors of a layer's recurrence.
        state: gives the bytes of one layer's recurrent state, from a config.json and the bytes
            of an activation.
        fused: projections of the recurrence that vLLM fuses into one.
        also: further keys that its class reads; a missing one means null.
        rest: fields of ``Family``.
    """
    needed = (*STATED, *stated)

    def sizes(_: str, config: Config) -> None:
        checks.require_counts(config, needed)
        convolution(name, config)

    def shapes(config: Config) -> dict[str, Shape]:
        sizes(name, config)
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        parts = {f"self_attn.{part}": shape for part, shape in layer(config).items()}
        parts |= dense.mlp(config) | dense.norms(config)
        model_shapes: dict[str, Shape] = {
            f"model.layers.{number}.{part}": shape
            for number in range(config["num_hidden_layers"])
            for part, shape in parts.items()
        }
        model_shapes |= {EMBEDDING: (vocabulary, hidden), "model.norm.weight": (hidden,)}
        if not config.get("tie_word_embeddings"):
            model_shapes[HEAD] = (vocabulary, hidden)
        return model_shapes

    def state_bytes(config: Config, width: int) -> int:
        convolution_bytes = footprint.convolution_elements(shapes(config)) * width
        return int(convolution_bytes + config["num_hidden_layers"] * state(config, width))

    def adapt(config: Any) -> None:
        """Set the attributes that vLLM reads without a default."""
        usual = {"tie_word_embeddings": False, "hidden_act": "silu"}
        usual |= {key: values[0] for key, values in only.items()} | dict.fromkeys(also)
        for key, value in usual.items():
            setattr(config, key, getattr(config, key, value))

    return Family(
        name=name,
        hf=name,
        module=f"attnres_serve.model.{name}",
        treated_as="Mamba2ForCausalLM",
        adapt=adapt,
        keys=lambda: (*needed, *READ, *only, *also),
        shapes=shapes,
        checks=(
            sizes,
            hugging_face.only_values(only),
            checks.values,
            checks.unquantized,
            *more_checks,
        ),
        window=None,
        cache_elements=lambda config: 0,
        state_bytes=state_bytes,
        fused=(*fused, ("gate_proj", "up_proj")),
        usual_eps=None,
        has_hf_class=False,
        is_stock=False,
        **rest,
    )
