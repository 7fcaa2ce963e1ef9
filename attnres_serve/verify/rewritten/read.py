"""A checkpoint of the house format, of Kimi Linear's or AliceAI's, or of Hugging Face's."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import alice_ai, hugging_face, kimi_k3
from attnres_serve.verify.rewritten.additive import require_additive
from attnres_serve.verify.rewritten.model import Rewritten, Site

_PREFIX = "attnres_"  # of the house format's model types
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")  # the norms' own, by class


def _attn_res(config: dict[str, Any]) -> dict[str, Any] | None:
    """What is stated of Attention Residuals, by the house format; None for none."""
    key = {"kimi_linear": "attn_res_block_size", alice_ai.NAME: "block_attn_res_block_size"}
    layers = config.get(key.get(config["model_type"], ""))
    if layers is not None:
        return {"block_size": 2 * layers}  # attention and experts in every layer
    return config.get("attn_res")


def load(
    folder: Path,
    sites: Sequence[Site],
    final_norm: str = "norm",
    model_type: str | None = None,
) -> Rewritten:
    """The checkpoint in float64.

    Args:
        folder: of the checkpoint.
        sites: every sublayer in the order in which they run, with the norm before it.
        final_norm: the path below the decoder of the norm before the head.
        model_type: Hugging Face's, where config.json's without ``attnres_`` is another.

    Raises:
        ValueError: Hugging Face has no such class, the checkpoint has other tensors than it wants,
            or its residual stream cannot be rewritten.
    """
    config = kimi_k3.text_of(json.loads((folder / "config.json").read_text()))
    named = config["model_type"].removeprefix(_PREFIX)
    build, readable = hugging_face.build, config
    if named == alice_ai.NAME:
        build, model_type = alice_ai.build, alice_ai.BASE
    elif kimi_k3.is_meant(config):
        build, readable = partial(kimi_k3.build, config), kimi_k3.readable(config)
    own = hugging_face.config(model_type or named, readable)
    names = oracle.depth_names(*{site.kind for site in sites})
    if config["model_type"] == alice_ai.NAME:
        names = alice_ai.DEPTH_NAMES
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    eps = next(getattr(own, key) for key in _EPS if hasattr(own, key))
    spec = oracle.Spec(names, layout, {}, own.hidden_size, own.vocab_size, eps, tied=False)
    if (attn_res := _attn_res(config)) is not None:
        oracle.add_depth(spec, attn_res)
    norms = (*(site.norm for site in sites), final_norm)
    weights = kimi_k3.of_the_text(oracle.read_weights(folder))
    if names is alice_ai.DEPTH_NAMES:  # the first site has no tensors, and any query one answer
        weights |= alice_ai.first_site(own.hidden_size)
    model = Rewritten(own, norms, spec, weights, build)
    found = {name: tuple(tensor.shape) for name, tensor in model.weights.items()}
    wanted = oracle.depth_shapes(spec)
    if odd := sorted(name for name, shape in wanted.items() if found.get(name) != shape):
        raise ValueError(f"missing or misshapen tensors: {odd}")
    require_additive(model)
    return model
