"""Checks of the adapters in ``--lora-modules``, from their files, before the engine starts."""

from collections.abc import Mapping
from pathlib import Path

from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError
from attnres_serve.lora import files, refusals

MODULES = "--lora-modules"


def check(
    arguments: Arguments, weight_shapes: Mapping[str, files.Shape], has_table: files.HasTable
) -> None:
    """Raise SettingError for an adapter that would not be applied whole.

    An adapter whose files are not on this machine is checked when it is loaded.

    Args:
        arguments: of vLLM.
        weight_shapes, has_table: as in ``files.Model``.
    """
    paths = {module["name"]: module["path"] for module in arguments.lora_modules}
    if not paths:
        return
    if not arguments.enable_lora:
        raise SettingError(f"{MODULES} is given without --enable-lora; give that as well.")
    names = [module["name"] for module in arguments.lora_modules]
    _check_names(names, arguments.served_model_name or [])
    model = files.Model(weight_shapes, arguments.max_lora_rank, has_table)
    for name, place in paths.items():
        folder = Path(place).expanduser()
        if folder.is_dir():
            problem = files.problem(folder, model)
        elif folder.is_absolute() or place.count("/") != 1:  # no model id
            problem = f"is no folder at {place}; give the folder that PEFT saved."
        else:
            continue
        if problem is not None:
            raise SettingError(f"{refusals.name_of(name)} {problem}")


def _check_names(names: list[str], served: list[str]) -> None:
    """Check that names are unique: vLLM answers with an adapter that has the model's name."""
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"found {name!r} twice after {MODULES}; give each its own name.")
        if name in served:
            raise SettingError(
                f"found {name!r} after {MODULES} and after --served-model-name; give the adapter "
                "another name, as requests for the model would be answered with it."
            )
