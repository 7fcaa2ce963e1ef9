"""Tensors of Attention Residuals under the config.json of a plain model, as custom trainers save.

The tensors determine most of the house format's ``attn_res``, but not the blocks.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from attnres_serve.checkpoints.names import LOOKS_LIKE_ATTNRES, site_of
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Family
from attnres_serve.formats import house
from attnres_serve.formats.refused import variant

SIZE, STARTS = house.BLOCKS.key, "block_starts"


@dataclass(frozen=True)
class Queries:
    """The tensors of Attention Residuals in a plain model's checkpoint.

    Attributes:
        family: of its config.json.
        names: of the tensors.
        options: of ``attn_res``, without the size of blocks, as the tensors show them.
    """

    family: Family
    names: list[str]
    options: dict[str, Any]

    @property
    def variant(self) -> str | None:
        """A tensor of another function than Block or Full AttnRes, and its meaning; or None."""
        return next((name + what for name in self.names if (what := variant(name))), None)

    def keys(self, blocks: Any) -> dict[str, Any]:
        """The keys of config.json to set for the house format.

        Args:
            blocks: the number of sublayers in a block.
        """
        return {
            "model_type": self.family.model_type,
            "architectures": [self.family.architecture],
            house.KEY: ({} if STARTS in self.options else {SIZE: blocks}) | self.options,
        }

    def advice(self, name: str, command: str) -> str:
        """A sentence about the changes of config.json that the tensors need.

        Args:
            name: the checkpoint's name.
            command: a ``convert`` command, to which an option can be added.
        """
        more = f" and {len(self.names) - 1} more" if self.names[1:] else ""
        sentence = f"{name} holds {self.names[0]}{more}, tensors of Attention Residuals, under the "
        sentence += f"config.json of a plain {self.family.title}"
        if self.variant:
            return f"{sentence}, and {self.variant} is of a function that is not supported."
        first, second, third = (f"{key} to {json.dumps(v)}" for key, v in self.keys("S").items())
        third = third.replace('"S"', "S")  # for a number
        sentence += f": set {first}, {second} and {third}"
        if STARTS not in self.options:
            sentence += " (S: sublayers of a block)"
        if self.options:
            return f'{sentence}, and in it "cumulative" to true if its sums were so.'
        return f"{sentence}, or run `{command} --block-size S`."


def queries(config: dict[str, Any], names: Collection[str]) -> Queries | None:
    """The tensors of Attention Residuals of a plain model; None for other models or without any.

    Args:
        config: the content of its config.json.
        names: of all its tensors.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    query_names = [name for name in names if LOOKS_LIKE_ATTNRES.search(name)]
    if family is None or not family.is_stock or not query_names:
        return None
    try:
        layout = family.layout(config)
    except CheckpointError:  # an invalid size
        return None
    sites = {site for name in query_names if (site := site_of(name, layout))}
    if not sites:
        return Queries(family, query_names, {})
    options: dict[str, Any] = {}
    if layout.num_sublayers not in {site for site, _ in sites}:
        options["final_mix"] = False
    if any(part == "bias" for _, part in sites):
        options["recency_bias"] = True
    owners = {site for site, part in sites if part == "proj"} - {layout.num_sublayers}
    if owners == {*layout.layer_starts} != {*range(layout.num_sublayers)}:
        options["shared_queries"] = "layer"
    elif 0 in owners and len(owners) < layout.num_sublayers:
        options |= {STARTS: sorted(owners), "shared_queries": "block"}
    return Queries(family, query_names, options)
