"""A checkpoint folder as far as it can be judged without an engine: config.json and the headers of
its safetensors files."""

import json
from pathlib import Path
from typing import Any

from attnres_serve import formats
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.translation import Translation
from attnres_serve.resolver import resolve
from attnres_serve.tensors import check_tensors, parts_of

PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``folder``/config.json.

    Raises:
        CheckpointError: no such folder, no such file, or not a JSON object.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; give the path of a checkpoint folder.")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; give the folder that holds config.json and the safetensors files."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not a checkpoint folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}; expected a JSON object.")
    return config


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the folder's safetensors files.

    Raises:
        CheckpointError: no safetensors file, a damaged one, or a shard missing.
    """
    from safetensors import SafetensorError, safe_open

    files = _weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                    if name in shapes:
                        raise CheckpointError(f"the tensor {name} is in more than one file.")
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged or truncated ({error}); copy or download it again."
            ) from None
    return shapes


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in table.values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{index} is damaged; copy or download it again.") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks the file {missing[0]}, which {index.name} names; copy or download "
                "it again."
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is "
            "read; save the model as safetensors instead."
        )
    raise CheckpointError(f"{folder} has no *.safetensors file, so there are no weights to serve.")


def inspect(folder: Path) -> Translation | None:
    """Resolve a folder and check that its tensors are exactly those the model needs.

    Returns:
        The translation, or None where this is no AttnRes checkpoint.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    config = read_config(folder)
    translation = resolve(config)
    if translation is not None:
        module = formats.by_name(translation.format)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in read_shapes(folder).items():
            shapes |= parts_of(module, name, shape)
        check_tensors(translation, shapes, module.rename)
    return translation
