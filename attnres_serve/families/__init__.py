"""Backbone families: one file for each, found by itself, with a ``FAMILY`` in it."""

import importlib
import pkgutil
from collections.abc import Iterator

from attnres_serve.depth.layout import Layout
from attnres_serve.families.family import PREFIX, Config, Family


def _found() -> Iterator[Family]:
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if family is not None:
            yield family


# By name; those that vLLM has too come first, each part in the order of the alphabet.
FAMILIES = {
    family.name: family
    for family in sorted(_found(), key=lambda family: (not family.is_stock, family.name))
}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES.values()}


def layout_of(config: Config) -> Layout:
    """The sublayers of the decoder of a family's config.json, with our model type or its own."""
    return FAMILIES[config["model_type"].removeprefix(PREFIX)].layout(config)
