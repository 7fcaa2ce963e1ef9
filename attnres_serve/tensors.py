"""Which tensors a checkpoint must hold, by the names of the house format."""

import re
from collections.abc import Callable, Mapping

from attnres_serve.errors import CheckpointError
from attnres_serve.formats.translation import Translation
from attnres_serve.schedule import site_name
from attnres_serve.spec import AttnResSpec

_ATTNRES = re.compile(
    r"^model\.(?:layers\.(?P<layer>\d+)\.(?P<kind>self_attention|mlp)_res"
    r"|(?P<final>output_attn)_res)_(?P<part>proj|norm)\.weight$"
)
# Left over in many checkpoints without a meaning of their own: rotary tables, a tied head.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$")
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


def check_tensors(
    translation: Translation,
    shapes: Mapping[str, tuple[int, ...]],
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
    _check_base(translation, own_names)


def _check_base(translation: Translation, own_names: Mapping[str, str]) -> None:
    """Raise if a tensor of the base model is missing or left over.

    Quantised checkpoints have names of their own, which vLLM checks when it loads them.
    """
    config = translation.config
    if config.get("quantization_config"):
        return
    needed = set(base_tensors(translation))
    for name in sorted(needed - set(own_names)):
        raise CheckpointError(
            f"the checkpoint lacks the tensor {name} (in house names), which a "
            f"{translation.base} model with {config['num_hidden_layers']} layers needs."
        )
    for name, own in own_names.items():
        known = name in needed or site_of(name, config["num_hidden_layers"])
        if not known and not _HARMLESS.search(name):
            raise CheckpointError(
                f"the checkpoint holds the tensor {own}, which a {translation.base} model with "
                f"{config['num_hidden_layers']} layers does not have; the configuration and the "
                "weights do not belong together."
            )


def base_tensors(translation: Translation) -> list[str]:
    """Names of the weights every model of the base family has, in Hugging Face's naming."""
    config = translation.config
    layer = [
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    if translation.base == "qwen2":
        layer += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    elif config.get("attention_bias"):
        biased = "qkvo" if translation.base == "llama" else "qkv"
        layer += [f"self_attn.{part}_proj.bias" for part in biased]
    if translation.base == "llama" and config.get("mlp_bias"):
        layer += [f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")]
    if translation.base == "qwen3":
        layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    names = [
        f"model.layers.{index}.{name}"
        for index in range(config["num_hidden_layers"])
        for name in layer
    ]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    return names if config.get("tie_word_embeddings") else [*names, "lm_head.weight"]
