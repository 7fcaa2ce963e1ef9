"""Tiny models by Hugging Face's classes in float64, with the norms that ``facts`` has of them."""

import json
from pathlib import Path

from facts import FACTS

from attnres_serve.verify import rewritten
from attnres_serve.verify.rewritten import Rewritten, Site


def sites_of(model_type: str, layers: int = 4) -> list[Site]:
    """Every sublayer of a model whose layers are alike."""
    return [
        Site(layer, kind, f"layers.{layer}.{norm}")
        for layer in range(layers)
        for kind, norm in FACTS[model_type].norms.items()
    ]


def load(folder: Path) -> Rewritten:
    """A checkpoint of Hugging Face's or of the house format in float64."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config  # of one that reads images too
    base = config["model_type"].removeprefix("attnres_")
    return rewritten.load(
        folder, sites_of(base, config["num_hidden_layers"]), FACTS[base].final_norm
    )
