"""Reads a checkpoint in the house format, Kimi Linear's, AliceAI's or Hugging Face's format."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import alice_ai, hugging_face, kimi_k3
from attnres_serve.verify.rewritten.additive import require_additive
from attnres_serve.verify.rewritten.model import Rewritten, Site

_HOUSE_PREFIX = "attnres_"  # begins the model types of the house format
# The names that Hugging Face's configuration classes give the epsilon of norms.
_EPS_NAMES = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")


def _house_attn_res(config: dict[str, Any]) -> dict[str, Any] | None:
    """The ``attn_res`` of the house format for a config.json; None without Attention Residuals."""
    block_size_key = {
        "kimi_linear": "attn_res_block_size",
        alice_ai.NAME: "block_attn_res_block_size",
    }
    block_layers = config.get(block_size_key.get(config["model_type"], ""))
    if block_layers is not None:
        return {"block_size": 2 * block_layers}  # every layer has two sublayers
    return config.get("attn_res")


def load(
    folder: Path,
    sites: Sequence[Site],
    final_norm: str = "norm",
    model_type: str | None = None,
) -> Rewritten:
    """Read a checkpoint as a rewritten model in float64.

    Args:
        folder: the folder of the checkpoint.
        sites: every sublayer in the order in which they run, with the norm before it.
        final_norm: the path of the norm before the head, relative to the decoder.
        model_type: the model type of Hugging Face's class; None if it is the model type in
            config.json without the prefix ``attnres_``.

    Raises:
        ValueError: Hugging Face has no class for the model type, the class needs other tensors,
            or its residual stream cannot be rewritten.
    """
    config = kimi_k3.language_config(json.loads((folder / "config.json").read_text()))
    base_type = config["model_type"].removeprefix(_HOUSE_PREFIX)
    build, readable_config = hugging_face.build, config
    if base_type == alice_ai.NAME:
        build, model_type = alice_ai.build, alice_ai.BASE
    elif kimi_k3.is_kimi_k3(config):
        build = partial(kimi_k3.build, config)
        readable_config = kimi_k3.readable(config)
    hf_config = hugging_face.config(model_type or base_type, readable_config)
    depth_names = oracle.depth_names(*{site.kind for site in sites})
    if config["model_type"] == alice_ai.NAME:
        depth_names = alice_ai.DEPTH_NAMES
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    eps = next(getattr(hf_config, key) for key in _EPS_NAMES if hasattr(hf_config, key))
    # Hugging Face's model computes the sublayers, so the specification has none.
    spec = oracle.Spec(
        depth_names,
        layout,
        sublayers={},
        hidden=hf_config.hidden_size,
        vocab=hf_config.vocab_size,
        eps=eps,
        tied=False,
    )
    if (attn_res := _house_attn_res(config)) is not None:
        oracle.add_depth(spec, attn_res)
    norms = (*(site.norm for site in sites), final_norm)
    weights = kimi_k3.language_tensors(oracle.read_weights(folder))
    # AliceAI's format stores no tensors of the first site, whose mix does not depend on its query.
    if depth_names is alice_ai.DEPTH_NAMES:
        weights |= alice_ai.first_site_tensors(hf_config.hidden_size)
    model = Rewritten(hf_config, norms, spec, weights, build)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.weights.items()}
    expected = oracle.depth_shapes(spec)
    if wrong := sorted(name for name, shape in expected.items() if shapes.get(name) != shape):
        raise ValueError(f"missing or misshapen tensors: {wrong}")
    require_additive(model)
    return model
