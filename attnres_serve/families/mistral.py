"""Mistral: Llama's shapes without biases, and a window in every layer if one is set."""

from attnres_serve.families import checks, dense, rotary
from attnres_serve.families.family import Config, Shape

UNREAD = ("attention_bias", "mlp_bias", "use_sliding_window")


def layer(config: Config) -> dict[str, Shape]:
    """The tensors of a layer."""
    return (
        dense.attention(config, dense.head_size(config)) | dense.mlp(config) | dense.norms(config)
    )


def window(config: Config) -> int | None:
    """The window of every layer, 4096 without the key; both classes read only this key."""
    window: int | None = config.get("sliding_window", 4096)
    return window


FAMILY = dense.family(
    "mistral",
    layer,
    title="Mistral",
    cls="MistralForCausalLM",
    keys=lambda: [key for key in dense.KEYS if key not in UNREAD],
    checks=(checks.values, checks.groups, checks.even_heads, rotary.check),
    window=window,
    windows_by_types=False,
    limits=frozenset(),
)
