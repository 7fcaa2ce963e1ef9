"""The adapters that ``--lora-modules`` names, checked by their files before the engine starts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve.checkpoints.checked import Checkpoint, read_tensor
from attnres_serve.compat import adapter_files, adapters
from attnres_serve.errors import SettingError
from attnres_serve.families.family import EMBEDDING, HEAD
from attnres_serve.flags import usual, value_of, values_of

if TYPE_CHECKING:
    from torch import Tensor

MODULES = "--lora-modules"
USUAL_RANK = 16  # vLLM's --max-lora-rank where none is given


def check(words: list[str], checkpoint: Checkpoint) -> None:
    """Raise SettingError for an adapter that would not be applied whole.

    One whose files are not on this machine is checked when it is loaded.

    Args:
        words: flags of vLLM's, with those of a file.
        checkpoint: the model that adapters are for.
    """
    named = list(_named(values_of(MODULES, words)))
    given = dict(named)
    if not given:
        return
    if "--enable-lora" not in map(usual, words):
        raise SettingError(f"{MODULES} is given without --enable-lora; give that as well.")
    _check_names([name for name, _ in named], values_of("--served-model-name", words))
    index, rank = checkpoint.index, value_of("--max-lora-rank", words) or ""
    model = adapter_files.Model(
        needed=index.base.needed if index else {},
        most_rank=int(rank) if rank.isdecimal() else USUAL_RANK,
        has_table=lambda leaf, table: _has_table(checkpoint, leaf, table),
    )
    for name, place in given.items():
        folder = Path(place).expanduser()
        if folder.is_dir():
            found = adapter_files.problem(folder, model)
        elif folder.is_absolute() or place.count("/") != 1:  # no model id
            found = f"is no folder at {place}; give the folder that PEFT saved."
        else:
            continue
        if found is not None:
            raise SettingError(f"{adapters.name_of(name)} {found}")


def _check_names(names: list[str], served: list[str]) -> None:
    """Requests name one thing: vLLM answers for an adapter where a model has its name, too."""
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"found {name!r} twice after {MODULES}; give each its own name.")
        if name in served:
            raise SettingError(
                f"found {name!r} after {MODULES} and after --served-model-name; give the adapter "
                "another name, as requests for the model would be answered with it."
            )


def _named(modules: list[str]) -> Iterator[tuple[str, str]]:
    """Names of adapters and their places, in vLLM's two ways to write them."""
    for module in modules:
        name, equals, place = module.partition("=")
        if equals and "," not in module:
            yield name, place
            continue
        try:
            written = json.loads(module)
            yield str(written["name"]), str(written["path"])
        except (ValueError, KeyError, TypeError):
            raise SettingError(
                f"found {module!r} after {MODULES}; expected NAME=FOLDER, or JSON such as "
                '{"name": "mine", "path": "FOLDER"}.'
            ) from None


def _has_table(checkpoint: Checkpoint, leaf: str, table: "Tensor") -> bool:
    """Whether a table equals the checkpoint's, in the type of fewer digits of the two."""
    import torch

    if checkpoint.index is None:  # its weights are not here
        return True
    names = checkpoint.index.own_names
    own = names.get(HEAD if leaf == "lm_head" else EMBEDDING) or names.get(EMBEDDING)
    if own is None or own not in checkpoint.headers:
        return False
    stored = read_tensor(checkpoint.headers, own)
    if stored.shape != table.shape or not stored.is_floating_point():
        return False
    common = min(stored.dtype, table.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(stored.to(common), table.to(common))
