"""The standard-residual twin of a checkpoint: the base family's own class with the same weights."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from attnres_serve import output
from attnres_serve.checkpoints.check import amount
from attnres_serve.checkpoints.checked import Checkpoint
from attnres_serve.checkpoints.convert.source import Source, Stream
from attnres_serve.checkpoints.names import is_left_over, site_of
from attnres_serve.checkpoints.read import header
from attnres_serve.checkpoints.write import shards, write_shards
from attnres_serve.compat import device
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit
from attnres_serve.formats import house
from attnres_serve.formats.parsed_config import ParsedConfig


def twin_config(parsed: ParsedConfig) -> dict[str, Any]:
    """The config.json of the twin, in the house format where our plugin serves it."""
    family = FAMILIES[parsed.base]
    if is_ours(family):
        own = {"architectures": [family.architecture], "model_type": family.model_type}
        return {**parsed.config, **own, house.KEY: None}
    own = {"architectures": [family.stock_architecture], "model_type": family.hf}
    return {**parsed.config, **own}


def is_ours(family: Family) -> bool:
    """Whether our plugin serves the twin, as a model without sites: stock vLLM cannot, here."""
    return not family.is_stock or (Limit.STOCK_ON_CPU in family.limits and device.is_cpu())


def write_twin(folder: Path, checkpoint: Checkpoint, target: Path) -> None:
    """Write the twin of an AttnRes checkpoint into the new folder ``target``.

    The weights, if it was checked with any, are copied bit for bit under the base family's names,
    without those of AttnRes; the epsilon of per-head norms, where it is one of its own, is the base
    family's.

    Raises:
        SettingError: it cannot be written.
    """
    parsed = checkpoint.translated(str(folder))
    source = Source(folder, checkpoint.config, parsed, checkpoint.headers)
    stream = _of_the_base(source, source.without_values())
    headers = {name: header(name, tensor, path) for path, name, tensor in stream}
    size, room = sum(h.stored_bytes for h in headers.values()), shutil.disk_usage(target.parent)
    mend = "choose another place by the variable XDG_CACHE_HOME."
    if size > room.free:
        raise SettingError(
            f"the baseline's weights need {amount(size)}, but {target.parent} has only "
            f"{amount(room.free)} free; {mend}"
        )
    tensors = ((name, tensor) for _, name, tensor in _of_the_base(source, source.tensors()))
    try:
        target.mkdir()
        (target / "config.json").write_text(json.dumps(twin_config(parsed)))
        with output.bar(total=size, unit="B", unit_scale=True, desc="baseline's weights") as bar:
            write_shards(target, shards(headers), tensors, bar.update)
    except OSError as error:
        raise SettingError(f"the baseline cannot be written ({error}); {mend}") from None


def _of_the_base(source: Source, tensors: Iterable[tuple[Path, str, Tensor]]) -> Stream:
    layout = source.parsed.layout
    for path, name, tensor in source.in_house_names(tensors):
        if site_of(name, layout) is None and not is_left_over(name, source.parsed.config):
            yield path, name, tensor
