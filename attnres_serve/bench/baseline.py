"""The standard-residual twin of a checkpoint: the base family's own class with the same weights."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from attnres_serve import hub
from attnres_serve.check import amount
from attnres_serve.checkpoint import examine, not_attnres, recognise
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.folder import Header, read_config
from attnres_serve.formats.translation import Translation
from attnres_serve.safetensors_file import SafetensorsFile
from attnres_serve.source import Source
from attnres_serve.tensors import is_left_over, site_of, split
from attnres_serve.weights import header


def translate(checkpoint: str, has_weights: bool) -> tuple[Path, Translation]:
    """A checkpoint's folder and what its config.json means.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        has_weights: whether they will be read; otherwise config.json alone must fit.

    Raises:
        CheckpointError: it cannot be served exactly as it was trained.
    """
    folder = hub.on_this_machine(checkpoint)
    config = read_config(folder)
    found = examine(folder).translation if has_weights else recognise(config, False, folder)
    if found is None:
        raise not_attnres(checkpoint, config)
    return folder, found


def twin_config(translation: Translation) -> dict[str, Any]:
    """The config.json of the twin.

    Raises:
        CheckpointError: stock vLLM has no class for it.
    """
    family = FAMILIES[translation.base]
    if family.attention_gate:
        raise CheckpointError(
            f"the {translation.format} format gates what attention returns, and stock vLLM has no "
            "such model with standard residuals to compare with; name one with --baseline PATH."
        )
    own = {"architectures": [family.cls], "model_type": family.hf}
    return {**translation.config, **own}


def write_twin(folder: Path, translation: Translation, target: Path, has_weights: bool) -> None:
    """Write the twin of the checkpoint in ``folder`` into the new folder ``target``.

    The weights are copied bit for bit under the base family's names, without those of AttnRes; the
    epsilon of per-head norms, where it is one of its own, is the base family's.

    Raises:
        CheckpointError: there is no twin.
        SettingError: it cannot be written.
    """
    config = twin_config(translation)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    if not has_weights:
        return
    source = Source(folder, config, translation, dict(examine(folder).headers))
    headers: dict[Path, dict[str, Header]] = {}
    for path, name, tensor in _of_the_base(source, source.without_values()):
        headers.setdefault(path, {})[name] = header(name, tensor, path)
    total = sum(found.stored_bytes for file in headers.values() for found in file.values())
    room = shutil.disk_usage(target).free
    if total > room:
        raise SettingError(
            f"the baseline's weights need {amount(total)}, but {target.parent} has only "
            f"{amount(room)} free; choose another place by the variable TMPDIR."
        )
    tensors = _of_the_base(source, source.tensors())
    with tqdm(total=total, unit="B", unit_scale=True, desc="baseline's weights") as bar:
        for number, names in enumerate(headers.values(), 1):
            shard = f"model-{number:05}-of-{len(headers):05}.safetensors"
            with SafetensorsFile(target / shard, names) as file:
                for _ in names:
                    _, name, tensor = next(tensors)
                    file.write(name, tensor, bar.update)


def _of_the_base(
    source: Source, tensors: Iterator[tuple[Path, str, Tensor]]
) -> Iterator[tuple[Path, str, Tensor]]:
    layers = source.translation.config["num_hidden_layers"]
    for path, name, tensor in tensors:
        if source.is_tied_head(name):
            continue
        for part, piece in split(source.format, name, tensor):
            house = source.format.rename(part)
            if site_of(house, layers) is None and not is_left_over(house, source.config):
                yield path, house, piece
