"""Qwen3, whose heads have a query and a key norm."""

from attnres_serve.families import checks, dense, head_checks, rotary
from attnres_serve.families.family import Config, Shape


def layer(config: Config) -> dict[str, Shape]:
    """The tensors of a layer."""
    head = dense.stated_head_size(config)
    biases = "qkv" if config.get("attention_bias") else ""
    names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    return (
        dense.attention(config, head, biases)
        | dense.mlp(config)
        | dense.norms(config)
        | dict.fromkeys(names, (head,))
    )


FAMILY = dense.family(
    "qwen3",
    layer,
    title="Qwen3",
    cls="Qwen3ForCausalLM",
    checks=(checks.values, checks.groups, head_checks.even_if_stated, rotary.check),
    window=checks.flagged_window,
    has_head_norms=True,
    limits=frozenset(),
)
