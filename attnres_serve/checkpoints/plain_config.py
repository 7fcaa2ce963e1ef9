"""Tensors of Attention Residuals under the config.json of a plain model, as own trainers save them.

The tensors tell most of what the house format's ``attn_res`` states, but not where blocks begin.
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
    """What a plain model's checkpoint holds of Attention Residuals.

    Attributes:
        family: of its config.json.
        names: the tensors.
        options: of ``attn_res``, beside the size of blocks, by the tensors.
    """

    family: Family
    names: list[str]
    options: dict[str, Any]

    @property
    def variant(self) -> str | None:
        """A tensor that no Block or Full AttnRes has, and why; None without one."""
        return next((name + what for name in self.names if (what := variant(name))), None)

    def keys(self, blocks: Any) -> dict[str, Any]:
        """The keys of config.json that make a checkpoint of the house format.

        Args:
            blocks: how many sublayers a block has.
        """
        return {
            "model_type": self.family.model_type,
            "architectures": [self.family.architecture],
            house.KEY: ({} if STARTS in self.options else {SIZE: blocks}) | self.options,
        }

    def advice(self, name: str, command: str) -> str:
        """What config.json must say for the tensors, in a sentence.

        Args:
            name: what the checkpoint is called.
            command: of ``convert``, to which an option can be added.
        """
        more = f" and {len(self.names) - 1} more" if self.names[1:] else ""
        said = f"{name} holds {self.names[0]}{more}, tensors of Attention Residuals, under the "
        said += f"config.json of a plain {self.family.title}"
        if self.variant:
            return f"{said}, and {self.variant} is of a function that is not supported."
        first, second, third = (f"{key} to {json.dumps(v)}" for key, v in self.keys("S").items())
        third = third.replace('"S"', "S")  # for a number
        said += f": set {first}, {second} and {third}"
        if STARTS not in self.options:
            said += " (S: sublayers of a block)"
        if self.options:
            return f'{said}, and in it "cumulative" to true if its sums were so.'
        return f"{said}, or run `{command} --block-size S`."


def queries(config: dict[str, Any], names: Collection[str]) -> Queries | None:
    """The tensors of Attention Residuals of a plain model; None for another model, and without any.

    Args:
        config: the content of its config.json.
        names: of all its tensors.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    found = [name for name in names if LOOKS_LIKE_ATTNRES.search(name)]
    if family is None or not family.is_stock or not found:
        return None
    try:
        layout = family.layout(config)
    except CheckpointError:  # of a size that is no size
        return None
    sites = {site for name in found if (site := site_of(name, layout))}
    if not sites:
        return Queries(family, found, {})
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
    return Queries(family, found, options)
