"""Model families: one module each, with a ``FAMILY`` in it; no list names them."""

import importlib
import pkgutil
from collections.abc import Iterator

from attnres_serve.depth.layout import Layout
from attnres_serve.families.family import PREFIX, Config, Family


def _families() -> Iterator[Family]:
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if family is not None:
            yield family


# By name: first the families that vLLM has too, then the others, each in alphabetical order.
FAMILIES = {
    family.name: family
    for family in sorted(_families(), key=lambda family: (not family.is_stock, family.name))
}
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES.values()}


def layout_of(config: Config) -> Layout:
    """The decoder's sublayers by a config.json, whose model type may have our prefix or not."""
    return FAMILIES[config["model_type"].removeprefix(PREFIX)].layout(config)
