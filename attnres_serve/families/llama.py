"""Llama."""

from attnres_serve.families import checks, dense, rotary
from attnres_serve.families.family import Config, Shape

CHECKS = (checks.values, checks.groups, checks.whole_heads, checks.even_heads, rotary.check)


def layer(config: Config) -> dict[str, Shape]:
    """The tensors of a layer."""
    biases = "qkvo" if config.get("attention_bias") else ""
    return (
        dense.attention(config, dense.head_size(config), biases)
        | dense.mlp(config, bias=bool(config.get("mlp_bias")))
        | dense.norms(config)
    )


FAMILY = dense.family(
    "llama",
    layer,
    title="Llama",
    cls="LlamaForCausalLM",
    checks=CHECKS,
    window=checks.stated_window,
    limits=frozenset(),
)
