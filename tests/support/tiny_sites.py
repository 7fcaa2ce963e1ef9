"""The norms before the sublayers of every tiny model, read off Hugging Face's classes."""

import json
from pathlib import Path

from attnres_serve.verify import rewritten
from attnres_serve.verify.rewritten import Rewritten, Site

USUAL = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
SANDWICH = {"attention": "input_layernorm", "mlp": "pre_feedforward_layernorm"}
CONVOLUTION = {"attention": "operator_norm", "mlp": "ffn_norm"}
ONE = {"mixer": "norm"}
NORMS = {
    "afmoe": {"attention": "input_layernorm", "mlp": "pre_mlp_layernorm"},
    "apertus": {"attention": "attention_layernorm", "mlp": "feedforward_layernorm"},
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
    "mamba2": ONE,
    "nemotron_h": ONE,
}
FINAL = {
    "lfm2": "embedding_norm",
    "lfm2_moe": "embedding_norm",
    "mamba2": "norm_f",
    "nemotron_h": "norm_f",
}


def sites_of(model_type: str, layers: int = 4) -> list[Site]:
    """Every sublayer of a model whose layers are alike."""
    return [
        Site(layer, kind, f"layers.{layer}.{norm}")
        for layer in range(layers)
        for kind, norm in NORMS.get(model_type, USUAL).items()
    ]


def load(folder: Path) -> Rewritten:
    """A checkpoint of Hugging Face's or of the house format in float64."""
    config = json.loads((folder / "config.json").read_text())
    base = config["model_type"].removeprefix("attnres_")
    return rewritten.load(
        folder, sites_of(base, config["num_hidden_layers"]), FINAL.get(base, "norm")
    )
