"""The baseline of a checkpoint: its family with standard residuals and the same weights."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from attnres_serve import output
from attnres_serve.checkpoints.base_tensors import is_left_over
from attnres_serve.checkpoints.checked import Checkpoint
from attnres_serve.checkpoints.convert.source import Source, Stream
from attnres_serve.checkpoints.names import site_of
from attnres_serve.checkpoints.read import header
from attnres_serve.checkpoints.write import shards, write_shards
from attnres_serve.compat import device
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit
from attnres_serve.formats import house
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.sentences import amount


def baseline_config(parsed: ParsedConfig) -> dict[str, Any]:
    """The config.json of the baseline, in the house format if the plugin serves it."""
    family = FAMILIES[parsed.family]
    if needs_plugin(family):
        keys = {"architectures": [family.architecture], "model_type": family.model_type}
        return {**parsed.config, **keys, house.KEY: None}
    keys = {"architectures": [family.stock_architecture], "model_type": family.hf}
    return {**parsed.config, **keys}


def needs_plugin(family: Family) -> bool:
    """Whether the plugin has to serve the baseline, because stock vLLM cannot on this device."""
    return not family.is_stock or (Limit.STOCK_ON_CPU in family.limits and device.is_cpu())


def write_baseline(folder: Path, checkpoint: Checkpoint, target: Path) -> None:
    """Write the baseline of an AttnRes checkpoint into the new folder ``target``.

    The weights, if the checkpoint has any, are copied bit for bit under the family's names, without
    those of AttnRes.  A special epsilon of per-head norms becomes the family's.

    Raises:
        SettingError: the baseline cannot be written.
    """
    parsed = checkpoint.translated(str(folder))
    source = Source(folder, checkpoint.config, parsed, checkpoint.headers)
    stream = _without_depth(source, source.without_values())
    headers = {name: header(name, tensor, path) for path, name, tensor in stream}
    size, room = sum(h.stored_bytes for h in headers.values()), shutil.disk_usage(target.parent)
    advice = "choose another place by the variable XDG_CACHE_HOME."
    if size > room.free:
        raise SettingError(
            f"the baseline's weights need {amount(size)}, but {target.parent} has only "
            f"{amount(room.free)} free; {advice}"
        )
    tensors = ((name, tensor) for _, name, tensor in _without_depth(source, source.tensors()))
    try:
        target.mkdir()
        (target / "config.json").write_text(json.dumps(baseline_config(parsed)))
        with output.bar(total=size, unit="B", unit_scale=True, desc="baseline's weights") as bar:
            write_shards(target, shards(headers), tensors, bar.update)
    except OSError as error:
        raise SettingError(f"the baseline cannot be written ({error}); {advice}") from None


def _without_depth(source: Source, tensors: Iterable[tuple[Path, str, Tensor]]) -> Stream:
    layout = source.parsed.layout
    for path, name, tensor in source.in_house_names(tensors):
        if site_of(name, layout) is None and not is_left_over(name, source.parsed.config):
            yield path, name, tensor
