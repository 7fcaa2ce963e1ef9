"""A checkpoint as far as it can be judged without an engine: config.json and the headers of its
safetensors files."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from attnres_serve import formats, hub
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.translation import Translation
from attnres_serve.resolver import resolve
from attnres_serve.tensors import TIED, check_tensors, check_tied, fingerprint, parts_of

INDEX = "model.safetensors.index.json"
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


def _weight_map(index: Path) -> dict[str, str]:
    """From the name of every tensor to the file that an index says it is in."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in table.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is damaged; copy or download it again.") from None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
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


def tensor_names(name: str | Path, revision: str | None = None) -> Collection[str] | None:
    """Names of a checkpoint's tensors, None where it has no safetensors files that can be had.

    Args:
        name: a folder, or a Hugging Face model id.
        revision: branch, tag or commit of a model id.

    Raises:
        CheckpointError: a file of a local folder is damaged.
    """
    folder = Path(name)
    if not folder.is_dir():
        return hub.read_shapes(str(name), revision)
    index = folder / INDEX
    if index.is_file():  # enough to tell names, also where the files themselves are elsewhere
        return _weight_map(index)
    return read_shapes(folder) if any(folder.glob("*.safetensors")) else None


def recognise(
    config: dict[str, Any],
    own_code: bool,
    name: str | Path,
    revision: str | None = None,
) -> Translation | None:
    """``resolve`` with the tensors of the checkpoint ``name`` at hand."""
    return resolve(config, own_code, lambda: tensor_names(name, revision))


def inspect(folder: Path) -> Translation | None:
    """Resolve a folder and check that its tensors are exactly those the model needs.

    Returns:
        The translation, or None where this is no AttnRes checkpoint.

    Raises:
        CheckpointError: for anything that cannot be served exactly.
    """
    translation = recognise(read_config(folder), False, folder)
    if translation is not None:
        _check_shapes(translation, read_shapes(folder))
        _check_tied_head(translation, folder)
    return translation


def inspect_hub(name: str, revision: str | None = None) -> Translation | None:
    """The same for a Hugging Face model id, as far as its headers can be had.

    Raises:
        CheckpointError: for anything that cannot be served exactly, or a model that does not exist.
    """
    translation = recognise(hub.read_config(name, revision), False, name, revision)
    if translation is not None and (shapes := hub.read_shapes(name, revision)) is not None:
        _check_shapes(translation, shapes)
    return translation


def _check_shapes(translation: Translation, shapes: dict[str, tuple[int, ...]]) -> None:
    module = formats.by_name(translation.format)
    parts: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        parts |= parts_of(module, name, shape)
    check_tensors(translation, parts, module.rename)


def _check_tied_head(translation: Translation, folder: Path) -> None:
    """Raise if the head is tied to the embedding and stored all the same, with other values."""
    from safetensors import safe_open

    if not translation.config.get("tie_word_embeddings"):
        return
    rename = formats.by_name(translation.format).rename
    found: dict[str, Any] = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as tensors:
            own = {rename(name): name for name in tensors.keys()}  # noqa: SIM118
            found |= {one: fingerprint(tensors.get_tensor(own[one])) for one in TIED if one in own}
    check_tied(found)
