"""Which tensors a checkpoint must hold, by the names of the house format."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.translation import Translation
from attnres_serve.formats.unsupported import variant
from attnres_serve.schedule import site_name, sites
from attnres_serve.spec import AttnResSpec, is_count

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, as far as it is known before it is read.

    Attributes:
        shape: its shape.
        dtype: its type as safetensors calls it, for example ``BF16``.
    """

    shape: Shape
    dtype: str


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
    r"|(?P<final>output_attn)_res)_(?:(?P<part>proj|norm)\.weight|(?P<bias>bias))$"
)
FLOATS = ("F64", "F32", "F16", "BF16")
EMBEDDING, HEAD = TIED = ("model.embed_tokens.weight", "lm_head.weight")
PARTS = {"proj": "query", "norm": "key norm", "bias": "recency bias"}
_LOOKS_LIKE_ATTNRES = re.compile(
    r"(^|[._])res_(proj|norm|bias|query|alpha|gate)|attn_res|attnres|null_source|pre_gate"
)


def site_of(name: str, num_layers: int) -> tuple[int, str] | None:
    """Site and part (a key of ``PARTS``) of an AttnRes tensor.

    Returns None for tensors of the base model; a site beyond 2L for a layer that the model has not.
    """
    match = _ATTNRES.match(name)
    if not match:
        return None
    part = match["part"] or match["bias"]
    if match["final"]:
        return 2 * num_layers, part
    site = 2 * int(match["layer"]) + (match["kind"] == "mlp")
    return site + (site >= 2 * num_layers), part


def tensor_name(site: int, part: str, num_layers: int) -> str:
    """The inverse of ``site_of``."""
    leaf = part if part == "bias" else f"{part}.weight"
    if site == 2 * num_layers:
        return f"model.output_attn_res_{leaf}"
    kind = "mlp" if site % 2 else "self_attention"
    return f"model.layers.{site // 2}.{kind}_res_{leaf}"


def expected_parts(spec: AttnResSpec | None) -> list[tuple[int, str]]:
    """Site and part of every AttnRes tensor of a checkpoint.

    Site 0's are among them though they never matter, as every format has them.
    """
    if spec is None:
        return []
    parts = [part for part in PARTS if part != "bias" or spec.recency_bias]
    owners = dict.fromkeys(site.tensors for site in sites(spec) if site.mixes)
    return [(site, part) for site in owners for part in parts]


def check_part(
    name: str, stored: Stored, site: int, part: str, hidden: int, num_layers: int
) -> None:
    """Raise CheckpointError if the AttnRes tensor ``name`` is not what its part must be."""
    shapes: dict[str, list[Shape]] = {
        "proj": [(1, hidden), (hidden,)],
        "norm": [(hidden,)],
        "bias": [(), (1,)],
    }
    allowed, shape = shapes[part], stored.shape
    if tuple(shape) not in allowed:
        raise CheckpointError(
            f"{name}, the {PARTS[part]} of {site_name(site, num_layers)}, has the shape "
            f"{list(shape)}; expected {list(allowed[0])}."
        )
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{name}, the {PARTS[part]} of {site_name(site, num_layers)}, holds {stored.dtype}; "
            f"expected {', '.join(FLOATS)}: queries and key norms are not quantised."
        )


def by_house_name(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """The checkpoint's own tensor names by their house names.

    Raises:
        CheckpointError: two tensors have the same meaning.
    """
    own_names: dict[str, str] = {}
    for name in names:
        if (other := own_names.setdefault(rename(name), name)) != name:
            raise CheckpointError(same_tensor(other, name))
    return own_names


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


def split(format_module, name: str, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
    """The parts that ``parts_of`` names, cut out of a tensor.

    Raises:
        CheckpointError: as ``parts_of`` does.
    """
    names = list(parts_of(format_module, name, tuple(tensor.shape)))
    pieces = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
    return zip(names, pieces, strict=True)


def check_sites(
    translation: Translation, stored: Mapping[str, Stored], own_names: Mapping[str, str]
) -> None:
    """Raise unless the checkpoint holds exactly the AttnRes tensors of its specification.

    Args:
        translation: what the resolver made of config.json.
        stored: shape and type of every tensor, by house names.
        own_names: the checkpoint's own names, by house names.

    Raises:
        CheckpointError: a query or key norm is missing, left over, quantised or misshapen.
    """
    spec, hidden = translation.spec, translation.config["hidden_size"]
    num_layers = translation.config["num_hidden_layers"]
    needed = {
        tensor_name(site, part, num_layers): (site, part) for site, part in expected_parts(spec)
    }
    for name, own in own_names.items():
        if name not in needed and _LOOKS_LIKE_ATTNRES.search(name):
            raise CheckpointError(
                f"the checkpoint holds the AttnRes tensor {own}{variant(own)}, for which its "
                "configuration has no site; the configuration and the weights do not belong "
                "together."
            )
    for name, (site, part) in needed.items():
        if name not in own_names:
            raise CheckpointError(
                f"the checkpoint lacks the {PARTS[part]} of {site_name(site, num_layers)} ({name} "
                "in house names); a missing one is never taken as zero, so save the model with all "
                "of them."
            )
        check_part(own_names[name], stored[name], site, part, hidden, num_layers)


def is_left_over(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor, by its house name, is in many checkpoints without being used: a rotary
    table, the copy of a tied head."""
    tied = name == HEAD and config.get("tie_word_embeddings")
    return bool(tied) or name.endswith("rotary_emb.inv_freq")


def same_tensor(first: str, second: str) -> str:
    """The sentence about two tensors of a checkpoint that mean the same weight."""
    return (
        f"the checkpoint holds both {first} and {second}, two names of one weight; which of them "
        "was trained cannot be told, so save the model with one."
    )


def check_tied(stored: Mapping[str, "Tensor"]) -> None:
    """Raise CheckpointError if a head that is tied to the embedding is stored with other values.

    Args:
        stored: those tensors of ``TIED`` that the checkpoint holds, by their house names.
    """
    if len(stored) < len(TIED):
        return
    import torch

    embedding, head = (stored[name] for name in TIED)
    same_kind = embedding.dtype == head.dtype and embedding.shape == head.shape
    if not (same_kind and torch.equal(_bits(embedding), _bits(head))):
        raise CheckpointError(
            "config.json ties the head to the embedding (tie_word_embeddings), but the checkpoint "
            "holds a head of its own with other values (lm_head.weight in house names); set "
            "tie_word_embeddings to false if it was trained untied, or remove the tensor."
        )


def check_spare_bias(name: str, tensor: "Tensor") -> None:
    """Raise CheckpointError if a bias that the model has not is more than zeros.

    vLLM would leave it out without a word.
    """
    if tensor.any():
        raise CheckpointError(
            f"the checkpoint holds the bias {name}, which is not zero and which the model does not "
            "have by config.json; the configuration and the weights do not belong together."
        )


def _bits(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def check_dtype(name: str, dtype: str) -> None:
    """Raise CheckpointError for a tensor that is quantised in a way that nothing tells.

    A quantization_config tells it of linear layers only, and not of a norm or a bias.

    Args:
        name: its name.
        dtype: its type as safetensors calls it.
    """
    if dtype not in FLOATS:
        raise CheckpointError(
            f"the tensor {name} holds {dtype}; expected {', '.join(FLOATS)}, as "
            "no quantization_config says how to read it otherwise."
        )


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
    llama = FAMILIES[base].hf == "llama"
    biased = "qkvo" if llama else "qkv"
    if base == "qwen2" or config.get("attention_bias"):
        layer |= {f"self_attn.{part}_proj.bias": (rows[part],) for part in biased}
    if llama and config.get("mlp_bias"):
        layer |= {
            f"mlp.{part}_proj.bias": (size,)
            for part, size in (("gate", width), ("up", width), ("down", hidden))
        }
    if FAMILIES[base].attention_gate:
        layer["self_attn.attn_gate.weight"] = (rows["q"], hidden)
        if config.get("attention_bias"):
            layer["self_attn.attn_gate.bias"] = (rows["q"],)
    if base == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes |= {EMBEDDING: (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes[HEAD] = (vocabulary, hidden)
    return shapes
