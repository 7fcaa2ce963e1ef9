"""Draft heads of checkpoints, which predict further tokens."""

from collections.abc import Iterator
from dataclasses import replace

from attnres_serve.families.family import Config, Family, Head, Shape

NORM, BOTH, ROWS = ("d",), ("d", "dd"), ("v", "d")  # BOTH reads a token and the model's output
BEHIND = Head(
    "normed",
    "model.layers.{}.",
    {
        "model.layers.{}.enorm.weight": NORM,
        "model.layers.{}.hnorm.weight": NORM,
        "model.layers.{}.eh_proj.weight": BOTH,
        "model.layers.{}.shared_head.norm.weight": NORM,
    },
    is_behind=True,
)
# vLLM's classes for these two do not share the model's head, and LITE shares no embedding.
DEEPSEEK = replace(
    BEHIND, others={**BEHIND.others, "model.layers.{}.shared_head.head.weight": ROWS}
)
LITE = replace(DEEPSEEK, others={**DEEPSEEK.others, "model.layers.{}.embed_tokens.weight": ROWS})
ERNIE = Head(
    "normed",
    "model.mtp_block.{}.",
    {
        "model.mtp_emb_norm.{}.weight": NORM,
        "model.mtp_hidden_norm.{}.weight": NORM,
        "model.mtp_linear_proj.{}.weight": BOTH,
    },
)
MTP = Head(
    "normed",
    "mtp.layers.{}.",
    {
        "mtp.pre_fc_norm_embedding.weight": NORM,
        "mtp.pre_fc_norm_hidden.weight": NORM,
        "mtp.fc.weight": BOTH,
        "mtp.norm.weight": NORM,
    },
)
QWEN = replace(MTP, usual=1)  # Qwen's files have no key for it


def shapes(family: Family, config: Config) -> dict[str, Shape]:
    """The shape of every tensor of a head, by its name.

    Args:
        family: of the model, one with heads.
        config: the model's config.json.
    """
    head = family.draft
    assert head is not None, "the family has heads"
    sizes = {"d": config["hidden_size"], "dd": 2 * config["hidden_size"], "v": config["vocab_size"]}
    first = config["num_hidden_layers"] if head.is_behind else 0
    head_shapes = {}
    for layer in range(first, first + head.layers(config)):
        for name, letters in head.others.items():
            head_shapes[name.format(layer)] = tuple(sizes[letter] for letter in letters)
        for name, shape in _layer(family, head, config, layer):
            head_shapes[head.layer.format(layer) + name] = shape
    return head_shapes


def _layer(family: Family, head: Head, config: Config, layer: int) -> Iterator[tuple[str, Shape]]:
    """Shapes of the tensors of a head's layer, by name within the layer.

    A layer that is not numbered after the model's has the attention of the first layer with full
    attention, and all else of the model's first layer.
    """
    count = config["num_hidden_layers"]
    if head.is_behind:
        more = layer + 1 - count
        config = {**config, "num_hidden_layers": layer + 1} | {
            key: [*value, *value[-1:] * more]
            for key, value in config.items()
            if isinstance(value, list) and len(value) == count
        }
    model = family.shapes(config)
    attends = layer
    if not head.is_behind:
        layer, output = 0, "model.layers.{}.self_attn.o_proj.weight"
        attends = next(number for number in range(count) if output.format(number) in model)
    for name, shape in model.items():
        leaf = name.removeprefix(f"model.layers.{attends}.")
        if leaf.startswith("self_attn."):
            yield leaf, shape
        leaf = name.removeprefix(f"model.layers.{layer}.")
        if leaf != name and not leaf.startswith(("self_attn.", "linear_attn.")):
            yield leaf, shape
