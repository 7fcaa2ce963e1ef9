"""A Llama with a gate on attention's output: ``o_proj(y * sigmoid(attn_gate(x)))``."""

from attnres_serve.families import checks, dense, llama
from attnres_serve.families.family import Config, Shape


def layer(config: Config) -> dict[str, Shape]:
    """The tensors of a layer."""
    queries = config["num_attention_heads"] * dense.head_size(config)
    gate: dict[str, Shape] = {"self_attn.attn_gate.weight": (queries, config["hidden_size"])}
    if config.get("attention_bias"):
        gate["self_attn.attn_gate.bias"] = (queries,)
    return llama.layer(config) | gate


FAMILY = dense.family(
    "gated_llama",
    layer,
    title="Llama with an attention gate",
    module="attnres_serve.model.gated_attention",
    cls="GatedLlamaForCausalLM",
    hf="llama",
    checks=llama.CHECKS,
    window=checks.stated_window,
    is_stock=False,
)
