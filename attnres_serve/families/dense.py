"""Families whose layers are attention over all heads and one gated MLP."""

from collections.abc import Callable
from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks
from attnres_serve.families.family import EMBEDDING, HEAD, Config, Family, Shape

KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
)
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Layer = Callable[[Config], dict[str, Shape]]  # the tensors of a layer, by their names in it


def family(name: str, layer: Layer, **rest: Any) -> Family:
    """A dense family; ``rest`` has the fields that differ from the usual ones."""

    def shapes(config: Config) -> dict[str, Shape]:
        return _model(config, layer)

    def cache_elements(config: Config) -> int:
        in_layer = layer(config)
        rows = sum(in_layer[f"self_attn.{part}_proj.weight"][0] for part in "kv")
        return int(config["num_hidden_layers"] * rows)

    usual: dict[str, Any] = {
        "module": f"vllm.model_executor.models.{name}",
        "hf": name,
        "keys": lambda: KEYS,
        "fused": FUSED,
        "shapes": shapes,
        "cache_elements": cache_elements,
    }
    return Family(name=name, **usual | rest)


def head_size(config: Config) -> int:
    """The size of a head; if none is stated, the hidden size divided by the number of heads."""
    usual = {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    return stated_head_size(config if config.get("head_dim") is not None else usual)


def stated_head_size(config: Config) -> int:
    """The size of a head.

    Raises:
        CheckpointError: config.json does not state it.
    """
    head: Any = config.get("head_dim")
    if not is_count(head):
        raise CheckpointError(f"head_dim is {head!r}; config.json must state it.")
    return int(head)


def attention(config: Config, head: int, biases: str = "") -> dict[str, Shape]:
    """Projections for queries, keys, values and the output.

    Args:
        config: a config.json.
        head: size of a head.
        biases: which of q, k, v and o have one.
    """
    hidden, queries = config["hidden_size"], config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
    weights: dict[str, Shape] = {
        f"self_attn.{part}_proj.weight": (size, queries if part == "o" else hidden)
        for part, size in rows.items()
    }
    return weights | {f"self_attn.{part}_proj.bias": (rows[part],) for part in biases}


def mlp(config: Config, bias: bool = False) -> dict[str, Shape]:
    """Projections for the gate, up and down."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, Shape] = {
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    if bias:
        shapes |= {f"mlp.{part}_proj.bias": (width,) for part in ("gate", "up")}
        shapes["mlp.down_proj.bias"] = (hidden,)
    return shapes


def norms(config: Config) -> dict[str, Shape]:
    """The norms before attention and MLP."""
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return dict.fromkeys(names, (config["hidden_size"],))


def _model(config: Config, layer: Layer) -> dict[str, Shape]:
    """The tensors of a model in which all layers are alike.

    Raises:
        CheckpointError: config.json does not state a size; defaults differ between families.
    """
    checks.require_counts(config, SIZES)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    in_layer = layer(config)
    shapes: dict[str, Shape] = {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in in_layer.items()
    }
    shapes |= {EMBEDDING: (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes[HEAD] = (vocabulary, hidden)
    return shapes
