"""Names of tensors: as a checkpoint stores them, and those of the house format."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import EMBEDDINGS, HEAD, Shape
from attnres_serve.formats.format import UNREAD, Format

if TYPE_CHECKING:
    from torch import Tensor


_ATTNRES = re.compile(
    r"^model\.(?:layers\.(?P<layer>\d+)\.(?P<kind>\w+?)_res"
    r"|(?P<final>output_attn)_res)_(?:(?P<part>proj|norm)\.weight|(?P<bias>bias))$"
)

_DRAFT_HEAD = re.compile(r"(model\.)?mtp[._]")
_IN_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.")
LOOKS_LIKE_ATTNRES = re.compile(
    r"(^|[._])res_(proj|norm|bias|query|alpha|gate)|attn_res|attnres|null_source|pre_gate"
)

# Prefixes that wrapper modules add to names.
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel, or DeepSpeed",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning Fabric",
    "base_model.model.": "PEFT",
}
WRAPPER = re.compile(rf"(^|\.)(?P<prefix>{'|'.join(map(re.escape, WRAPPERS))})")
# Saved buffers, which are no weights.  vLLM itself skips the common `rotary_emb.inv_freq`.
BUFFER = re.compile(
    r"(^|\.)(((self_)?attn|attention)\.(bias|mask|tril)|masked_bias|(causal|attn|attention)_mask"
    r"|(cos|sin)_cached?|freqs_(cis|cos|sin)|(?<!rotary_emb\.)inv_freq)$"
)

TIED = (*EMBEDDINGS, HEAD)

# Kinds of sublayers with another name in tensor names.
_HOUSE_KINDS = {"attention": "self_attention"}
_KINDS = {house: kind for kind, house in _HOUSE_KINDS.items()}

IMAGES = "images."  # the prefix that formats give to tensors that read images
PARTS = {"proj": "query", "norm": "key norm", "bias": "AttnRes bias"}


def site_of(name: str, layout: Layout) -> tuple[int, str] | None:
    """Site and part (a key of ``PARTS``) of an AttnRes tensor.

    Returns None for other tensors; a site after the final one for a sublayer that the model does
    not have, of a kind that it has.
    """
    match = _ATTNRES.match(name)
    if not match:
        return None
    part, final = match["part"] or match["bias"], layout.num_sublayers
    if match["final"]:
        return final, part
    kind = _KINDS.get(match["kind"], match["kind"])
    if kind not in layout.kinds or match["kind"] in _HOUSE_KINDS:
        return None
    site = layout.find(int(match["layer"]), kind)
    return final + 1 if site is None else site, part


def tensor_name(site: int, part: str, layout: Layout) -> str:
    """The inverse of ``site_of``."""
    leaf = part if part == "bias" else f"{part}.weight"
    if site == layout.num_sublayers:
        return f"model.output_attn_res_{leaf}"
    sublayer = layout.sublayers[site]
    kind = _HOUSE_KINDS.get(sublayer.kind, sublayer.kind)
    return f"model.layers.{sublayer.layer}.{kind}_res_{leaf}"


def expected_parts(spec: AttnResSpec | None) -> list[tuple[int, str]]:
    """Site and part of every AttnRes tensor of a checkpoint.

    They include those of site 0, which have no effect but are in every format.
    """
    if spec is None:
        return []
    parts = [part for part in PARTS if part != "bias" or spec.has_biases]
    owners = dict.fromkeys(site.tensors for site in sites(spec) if site.mixes)
    return [(site, part) for site in owners for part in parts]


def parts_of(checkpoint_format: Format, name: str, shape: Shape) -> dict[str, Shape]:
    """The shapes of a tensor's parts, by names for the format's ``rename``.

    One, the tensor itself, unless the format fuses weights.

    Raises:
        CheckpointError: a fused tensor does not have equal parts.
    """
    names = checkpoint_format.fused_parts(name)
    if len(names) == 1:
        return {name: shape}
    if not shape or shape[0] % len(names):
        raise CheckpointError(
            f"{name} has the shape {list(shape)}; it should hold {len(names)} parts of equal size, "
            "one after the other along the first dimension."
        )
    return dict.fromkeys(names, (shape[0] // len(names), *shape[1:]))


def cut(tensor: "Tensor", count: int) -> tuple["Tensor", ...]:
    """The equal parts of a tensor along its first dimension; for one part the tensor itself."""
    return tensor.chunk(count) if count > 1 else (tensor,)


def is_ignored(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor, by its house name, predicts further tokens, reads images or is not read."""
    return is_of_images(name) or is_unread(name) or is_draft(name, config)


def is_of_images(name: str) -> bool:
    """Whether a tensor, by its house name, reads images, without which models are served."""
    return name.startswith(IMAGES)


def is_unread(name: str) -> bool:
    """Whether a tensor, by its house name, is never read by the format's code."""
    return name.startswith(UNREAD)


def is_draft(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor, by its house name, belongs to layers that predict further tokens.

    Models are served without them.
    """
    if _DRAFT_HEAD.match(name):
        return True
    layers, further = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    match = _IN_LAYER.match(name) if further else None
    return match is not None and layers <= int(match["layer"]) < layers + further


def same_tensor(first: str, second: str) -> str:
    """The sentence about two tensors of a checkpoint for the same weight."""
    return (
        f"the checkpoint holds both {first} and {second}, two names of one weight; which of them "
        "was trained cannot be told, so save the model with one."
    )
