"""Reads a checkpoint of the house format, of Kimi Linear, AliceAI or Hugging Face."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import alice_ai, hugging_face, kimi_k3
from attnres_serve.verify.rewritten.additive import require_additive
from attnres_serve.verify.rewritten.model import Rewritten, Site

_PREFIX = "attnres_"  # prefix of the house format's model types
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")  # the norms' epsilon, by class


def _attn_res(config: dict[str, Any]) -> dict[str, Any] | None:
    """The stated Attention Residuals in the form of the house format, or None."""
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
        folder: the checkpoint.
        sites: every sublayer in the order in which they run, with the norm before it.
        final_norm: the path of the norm before the head, relative to the decoder.
        model_type: Hugging Face's, if it is not config.json's without ``attnres_``.

    Raises:
        ValueError: Hugging Face has no such class, the class needs other tensors, or its
            residual stream cannot be rewritten.
    """
    config = kimi_k3.text_of(json.loads((folder / "config.json").read_text()))
    named = config["model_type"].removeprefix(_PREFIX)
    build, readable = hugging_face.build, config
    if named == alice_ai.NAME:
        build, model_type = alice_ai.build, alice_ai.BASE
    elif kimi_k3.is_kimi_k3(config):
        build, readable = partial(kimi_k3.build, config), kimi_k3.readable(config)
    hf_config = hugging_face.config(model_type or named, readable)
    names = oracle.depth_names(*{site.kind for site in sites})
    if config["model_type"] == alice_ai.NAME:
        names = alice_ai.DEPTH_NAMES
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    eps = next(getattr(hf_config, key) for key in _EPS if hasattr(hf_config, key))
    spec = oracle.Spec(
        names, layout, {}, hf_config.hidden_size, hf_config.vocab_size, eps, tied=False
    )
    if (attn_res := _attn_res(config)) is not None:
        oracle.add_depth(spec, attn_res)
    norms = (*(site.norm for site in sites), final_norm)
    weights = kimi_k3.of_the_text(oracle.read_weights(folder))
    # The first site has no tensors, and its mix does not depend on its query.
    if names is alice_ai.DEPTH_NAMES:
        weights |= alice_ai.first_site(hf_config.hidden_size)
    model = Rewritten(hf_config, norms, spec, weights, build)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.weights.items()}
    expected = oracle.depth_shapes(spec)
    if odd := sorted(name for name, shape in expected.items() if shapes.get(name) != shape):
        raise ValueError(f"missing or misshapen tensors: {odd}")
    require_additive(model)
    return model
