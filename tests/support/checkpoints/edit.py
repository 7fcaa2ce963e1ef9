"""Checkpoints that are changed where they are."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A checkpoint's config.json with other values; ... leaves a key out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def edit(
    folder: Path,
    tensors: Callable[[dict[str, Tensor]], Any] | None = None,
    without: Collection[str] = (),
    **changes: Any,
) -> Path:
    """Change a checkpoint's tensors by a function, and its config.json. Returns its folder.

    `changes` are keys of config.json with other values, `without` those that it loses.
    """
    config = config_of(folder, **changes | dict.fromkeys(without, ...))
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        kept = {name: tensor.contiguous() for name, tensor in held.items()}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
