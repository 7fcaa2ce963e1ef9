"""Which tensors a checkpoint must hold, by the names of the house format."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.formats.translation import Translation
from attnres_serve.schedule import site_name
from attnres_serve.spec import AttnResSpec, is_count

Shape = tuple[int, ...]

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)

_ATTNRES = re.compile(
    r"^model\.(?:layers\.(?P<layer>\d+)\.(?P<kind>self_attention|mlp)_res"
    r"|(?P<final>output_attn)_res)_(?P<part>proj|norm)\.weight$"
)
_LOOKS_LIKE_ATTNRES = re.compile(r"(^|[._])res_(proj|norm|bias|query|alpha|gate)|attn_res|attnres")


def site_of(name: str, num_layers: int) -> tuple[int, str] | None:
    """Site and part (``proj``: pseudo-query, ``norm``: key-norm weight) of an AttnRes tensor.

    Returns None for tensors of the base model; a site beyond 2L for a layer that the model has not.
    """
    match = _ATTNRES.match(name)
    if not match:
        return None
    if match["final"]:
        return 2 * num_layers, match["part"]
    site = 2 * int(match["layer"]) + (match["kind"] == "mlp")
    return site + (site >= 2 * num_layers), match["part"]


def tensor_name(site: int, part: str, num_layers: int) -> str:
    """The inverse of ``site_of``."""
    if site == 2 * num_layers:
        return f"model.output_attn_res_{part}.weight"
    kind = "mlp" if site % 2 else "self_attention"
    return f"model.layers.{site // 2}.{kind}_res_{part}.weight"


def expected_sites(spec: AttnResSpec) -> range:
    """Sites whose query and key norm a checkpoint carries (site 0's are there but never matter)."""
    return range(spec.num_sublayers + spec.final_mix)


def parts_of(format_module, name: str, shape: Shape) -> dict[str, Shape]:
    """The parts that a tensor of a checkpoint holds, by names that the format's ``rename`` knows.

    One, the tensor itself, unless the format fuses weights.

    Raises:
        CheckpointError: a fused tensor is not made of equal parts.
    """
    parts = getattr(format_module, "parts", None)
    names = parts(name) if parts else (name,)
    if len(names) == 1:
        return {name: shape}
    if not shape or shape[0] % len(names):
        raise CheckpointError(
            f"{name} has the shape {list(shape)}; it should hold {len(names)} parts of equal size, "
            "one after the other along the first dimension."
        )
    return dict.fromkeys(names, (shape[0] // len(names), *shape[1:]))


def check_tensors(
    translation: Translation,
    shapes: Mapping[str, Shape],
    rename: Callable[[str], str],
) -> None:
    """Raise unless the checkpoint holds exactly the AttnRes tensors of its specification.

    Args:
        translation: what the resolver made of config.json.
        shapes: shape of every tensor, by the checkpoint's own names.
        rename: the format's renaming.

    Raises:
        CheckpointError: a query or key norm is missing, left over or of the wrong shape.
    """
    spec, hidden = translation.spec, translation.config["hidden_size"]
    own_names = {rename(name): name for name in shapes}
    num_layers = translation.config["num_hidden_layers"]
    needed = {
        tensor_name(site, part, num_layers): (site, part)
        for site in (expected_sites(spec) if spec else ())
        for part in ("proj", "norm")
    }
    for name, own in own_names.items():
        if name not in needed and _LOOKS_LIKE_ATTNRES.search(name):
            raise CheckpointError(
                f"the checkpoint holds the AttnRes tensor {own}, for which its configuration has "
                "no site; the configuration and the weights do not belong together."
            )
    for name, (site, part) in needed.items():
        where = f"{'query' if part == 'proj' else 'key norm'} of {site_name(site, num_layers)}"
        if name not in own_names:
            raise CheckpointError(
                f"the checkpoint lacks the {where} ({name} in house names); a missing one is never "
                "taken as zero, so save the model with all of them."
            )
        shape = shapes[own_names[name]]
        if shape not in ([(1, hidden), (hidden,)] if part == "proj" else [(hidden,)]):
            raise CheckpointError(
                f"{own_names[name]}, the {where}, has the shape {list(shape)}; expected "
                f"{[1, hidden] if part == 'proj' else [hidden]}."
            )
    _check_base(translation, {name: shapes[own] for name, own in own_names.items()}, own_names)


def _check_base(
    translation: Translation, shapes: Mapping[str, Shape], own_names: Mapping[str, str]
) -> None:
    """Raise if a tensor of the base model is missing, misshapen or left over.

    vLLM's loaders cut a weight that is too large without a word, so shapes are judged here.
    Quantised checkpoints have names and shapes of their own, which vLLM checks when it loads them.
    """
    config = translation.config
    if config.get("quantization_config"):
        return
    needed = base_shapes(translation.base, config)
    for name, shape in needed.items():
        if name not in shapes:
            raise CheckpointError(
                f"the checkpoint lacks the tensor {name} (in house names), which a "
                f"{translation.base} model with {config['num_hidden_layers']} layers needs."
            )
        check_shape(own_names[name], shapes[name], shape)
    for name, own in own_names.items():
        known = name in needed or site_of(name, config["num_hidden_layers"])
        if not known and not is_left_over(name, config):
            raise CheckpointError(
                f"the checkpoint holds the tensor {own}, which a {translation.base} model with "
                f"{config['num_hidden_layers']} layers does not have; the configuration and the "
                "weights do not belong together."
            )


def is_left_over(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor, by its house name, is in many checkpoints without being used: a rotary
    table, the copy of a tied head."""
    tied = name == "lm_head.weight" and config.get("tie_word_embeddings")
    return bool(tied) or name.endswith("rotary_emb.inv_freq")


def check_shape(name: str, found: Shape, expected: Shape) -> None:
    """Raise CheckpointError if a tensor has not the shape that its configuration gives it."""
    if tuple(found) != tuple(expected):
        raise CheckpointError(
            f"the tensor {name} has the shape {list(found)}, but config.json makes it "
            f"{list(expected)}; the configuration and the weights do not belong together."
        )


def base_shapes(base: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """The weights of a base model by Hugging Face's names.

    Raises:
        CheckpointError: config.json leaves a size to a default, which differs between families.
    """
    for key in SIZES:
        if not is_count(config.get(key)):
            raise CheckpointError(
                f"{key} is {config.get(key)!r}; config.json must state it, a whole number of at "
                "least 1."
            )
    hidden, width, vocabulary = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head: Any = config.get("head_dim")
    if head is None and base != "qwen3":
        head = hidden // heads
    if not is_count(head):
        raise CheckpointError(f"head_dim is {head!r}; config.json must state it.")
    rows = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head, "o": hidden}
    layer: dict[str, Shape] = {
        f"self_attn.{part}_proj.weight": (size, heads * head if part == "o" else hidden)
        for part, size in rows.items()
    }
    layer |= {
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    biased = "qkvo" if base == "llama" else "qkv"
    if base == "qwen2" or config.get("attention_bias"):
        layer |= {f"self_attn.{part}_proj.bias": (rows[part],) for part in biased}
    if base == "llama" and config.get("mlp_bias"):
        layer |= {
            f"mlp.{part}_proj.bias": (size,)
            for part, size in (("gate", width), ("up", width), ("down", hidden))
        }
    if base == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes
