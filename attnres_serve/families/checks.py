"""Checks of config.json values that vLLM or Hugging Face's class would fail on."""

from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Check, Config, Family

_DTYPES = ("float32", "float16", "bfloat16")
LONGEST = 2**31 - 1  # tokens of a context


def values(name: str, config: Config, activations: tuple[str, ...] = ("silu",)) -> None:
    """Raise CheckpointError for a value that a family does not have.

    Args:
        name: the family.
        config: its config.json.
        activations: of its MLP.
    """
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        if type(config.get(key, False)) is not bool:
            raise CheckpointError(f"{key} is {config[key]!r}; expected true or false.")
    longest: Any = config.get("max_position_embeddings", 1)
    if not is_count(longest) or longest > LONGEST:
        raise CheckpointError(
            f"max_position_embeddings is {longest!r}; expected a whole number of tokens, from 1 to "
            f"{LONGEST}."
        )
    if (act := config.get("hidden_act", activations[0])) not in activations:
        supported = " or ".join(map(repr, activations))
        raise CheckpointError(f"hidden_act is {act!r}; supported on {name} is {supported}.")
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None and str(config[key]).removeprefix("torch.") not in _DTYPES:
            raise CheckpointError(
                f"{key} is {config[key]!r}; expected null, {', '.join(_DTYPES[:-1])} or "
                f"{_DTYPES[-1]}."
            )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        ids = value if isinstance(value, list) and key.startswith("eos") else [value]
        if value is not None and not all(type(token) is int for token in ids):
            raise CheckpointError(f"{key} is {value!r}; expected the number of a token, or null.")


def check_ends(config: Config, file: str, rows: Any = None) -> None:
    """Raise CheckpointError for an end-of-sequence token without a logit in the model.

    Args:
        config: the content of ``file``.
        file: the name of the file that states the tokens.
        rows: the number of logits; None if ``config`` states it.
    """
    rows, stated = rows or config.get("vocab_size"), config.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [stated]
    if not is_count(rows) or all(end is None or end in range(rows) for end in ends):
        return
    raise CheckpointError(
        f"eos_token_id of {file} is {stated!r}; expected ids from 0 to {rows - 1}, for which the "
        f"model has logits (vocab_size {rows}), or null. State the tokens that end an answer as "
        "the tokenizer numbers them."
    )


def groups(name: str, config: Config) -> None:
    """Raise CheckpointError unless query heads divide evenly among the key and value heads."""
    if not (sizes := head_sizes(config)):
        return
    _, heads, kv_heads = sizes
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}."
        )


def whole_heads(name: str, config: Config) -> None:
    """Raise CheckpointError unless the number of heads divides the hidden size."""
    if not (sizes := head_sizes(config)):
        return
    hidden, heads, _ = sizes
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size {hidden} is not divisible by num_attention_heads {heads}, as Hugging "
            f"Face's {name} needs."
        )


def even_heads(name: str, config: Config) -> None:
    """Raise CheckpointError for an odd head size, stated or computed from the hidden size."""
    if sizes := head_sizes(config):
        head = config.get("head_dim")
        check_even(sizes[0] // sizes[1] if head is None else head)


def require_counts(config: Config, keys: tuple[str, ...]) -> None:
    """Raise CheckpointError unless whole numbers of at least 1 are stated under all ``keys``."""
    for key in keys:
        if not is_count(config.get(key)):
            raise CheckpointError(
                f"{key} is {config.get(key)!r}; config.json must state it, a whole number of at "
                "least 1."
            )


def unquantized(name: str, config: Config) -> None:
    """Raise CheckpointError for quantized weights; the family was never run with them."""
    if quantization := config.get("quantization_config"):
        raise CheckpointError(
            f"quantization_config is {quantization!r}; {name} is served without quantization "
            "alone: give the checkpoint that this one was quantized from."
        )


def full_attention(name: str, config: Config) -> None:
    """Raise CheckpointError for layers without full attention, the only kind of vLLM's class."""
    kinds: Any = config.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(
            f"layer_types is {kinds!r}; supported on {name} is full_attention alone, or none."
        )


def kinds(*supported: str) -> Check:
    """A check that ``layer_types`` has supported kinds only; both classes read it."""

    def check(name: str, config: Config) -> None:
        if "sliding_attention" in supported and config.get("sliding_window", 1) is None:
            raise CheckpointError(
                f"sliding_window is None, and {name} has layers with a window; give it a number of "
                "tokens."
            )
        layer_types: Any = config.get("layer_types")
        layers = config.get("num_hidden_layers")
        if layer_types is not None and (
            not isinstance(layer_types, list)
            or len(layer_types) != layers
            or not {*layer_types} <= {*supported}
        ):
            raise CheckpointError(
                f"layer_types is {layer_types!r}; supported on {name} is a list of {layers} of "
                f"{' and '.join(supported)}."
            )

    return check


def check_even(head: Any) -> None:
    """Raise CheckpointError for an odd head size."""
    if is_count(head) and head % 2:
        raise CheckpointError(f"head_dim is {head}; rotary embedding needs an even number.")


def head_sizes(config: Config) -> tuple[int, int, int] | None:
    """Hidden size, heads and heads for keys; None if one is missing or no number.

    ``Family.shapes`` raises for that."""
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, kv_heads = (config.get(key, 0) for key in keys)
    if is_count(hidden) and is_count(heads) and is_count(kv_heads):
        return hidden, heads, kv_heads
    return None


def check_windows(family: Family, config: Config) -> None:
    """Raise CheckpointError if vLLM's decoder has other windows than Hugging Face's class."""
    window, stated = config.get("sliding_window"), config.get("layer_types")
    if stated is not None and not (
        isinstance(stated, list) and all(isinstance(kind, str) for kind in stated)
    ):
        raise CheckpointError(f"layer_types is {stated!r}; expected a list of names, or none.")
    if stated is not None and len(stated) != config["num_hidden_layers"]:
        raise CheckpointError(
            f"layer_types names {len(stated)} layers; the model has {config['num_hidden_layers']}."
        )
    if window is not None and not is_count(window):
        raise CheckpointError(
            f"sliding_window is {window!r}; expected null or a number of tokens, at least 1."
        )
    if family.window is None:
        return
    types, window = set(stated or ()), family.window(config)
    right = "full_attention" if window is None else "sliding_attention"
    if types - {right} or (window is not None and family.windows_by_types and not types):
        what, supported = f"sliding_window {window!r}", f"layer_types with {right} alone, or none"
        if family.windows_by_types:
            what = (
                f"sliding_window {config.get('sliding_window')!r} with use_sliding_window "
                f"{config.get('use_sliding_window')!r}"
            )
            supported = "no window, or sliding_attention stated in layer_types for every layer"
        raise CheckpointError(
            f"{what} and layer_types {sorted(types)} is not supported on {family.name}: vLLM would "
            f"give its layers other windows; supported are {supported}."
        )


def stated_window(config: Config) -> int | None:
    """The window by ``sliding_window`` alone; None without the key."""
    return config.get("sliding_window") or None


def flagged_window(config: Config) -> int | None:
    """The window of a class that reads ``use_sliding_window``; 4096 if no size is stated."""
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
