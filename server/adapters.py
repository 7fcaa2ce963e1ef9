"""The adapters that ``--lora-modules`` names, checked by their files before the engine starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve.checkpoints.checked import Checkpoint, read_tensor
from attnres_serve.compat import adapter_files, adapters
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError
from attnres_serve.families.family import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor

MODULES = "--lora-modules"


def check(arguments: Arguments, checkpoint: Checkpoint) -> None:
    """Raise SettingError for an adapter that would not be applied whole.

    One whose files are not on this machine is checked when it is loaded.

    Args:
        arguments: of vLLM.
        checkpoint: the model that adapters are for.
    """
    given = {module["name"]: module["path"] for module in arguments.lora_modules}
    if not given:
        return
    if not arguments.enable_lora:
        raise SettingError(f"{MODULES} is given without --enable-lora; give that as well.")
    names = [module["name"] for module in arguments.lora_modules]
    _check_names(names, arguments.served_model_name or [])
    index = checkpoint.index
    model = adapter_files.Model(
        needed=index.base.needed if index else {},
        most_rank=arguments.max_lora_rank,
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
