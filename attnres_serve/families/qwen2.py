"""Qwen2."""

from attnres_serve.families import checks, dense, head_checks, rotary
from attnres_serve.families.family import Config, Shape


def layer(config: Config) -> dict[str, Shape]:
    """The tensors of a layer."""
    return (
        dense.attention(config, dense.head_size(config), biases="qkv")
        | dense.mlp(config)
        | dense.norms(config)
    )


FAMILY = dense.family(
    "qwen2",
    layer,
    title="Qwen2",
    cls="Qwen2ForCausalLM",
    checks=(
        checks.values,
        checks.groups,
        checks.whole_heads,
        head_checks.fixed,
        checks.even_heads,
        rotary.check,
    ),
    window=checks.flagged_window,
    limits=frozenset(),
)
