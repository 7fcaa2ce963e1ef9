"""A Llama with head norms: of queries before the rotary embedding, of keys after it.

Weights differ within a rotary pair, so the order matters. It is neither that of Qwen3 nor the
reverse.  Embeddings may be multiplied by the square root of the hidden size.
"""

from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks, dense, llama
from attnres_serve.families.family import Config, Shape

NORMS, SCALE = "use_qk_norm", "scale_embeds"  # keys of config.json
DEFAULTS = {NORMS: True, SCALE: False}


def flags(name: str, config: Config) -> None:
    """Raise CheckpointError if a switch of the family is neither true nor false."""
    for key, usual in DEFAULTS.items():
        if type(config.get(key, usual)) is not bool:
            raise CheckpointError(f"{key} is {config[key]!r}; expected true or false.")


def layer(config: Config) -> dict[str, Shape]:
    """The tensors of a layer."""
    shapes = llama.layer(config)
    if config.get(NORMS, DEFAULTS[NORMS]):
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        shapes |= dict.fromkeys(names, (dense.head_size(config),))
    return shapes


FAMILY = dense.family(
    "normed_llama",
    layer,
    title="Llama with norms of queries and rotated keys",
    module="attnres_serve.model.normed_attention",
    cls="NormedLlamaForCausalLM",
    hf="llama",
    keys=lambda: (*dense.KEYS, *DEFAULTS),
    checks=(*llama.CHECKS, flags),
    window=checks.stated_window,
    is_stock=False,
    has_head_norms=True,
)
