"""The adapters that ``--lora-modules`` names, checked by their files before the engine starts."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnres_serve.errors import SettingError
from attnres_serve.flags import usual, value_of, values_of
from attnres_serve.lora import files, refusals

MODULES = "--lora-modules"
USUAL_RANK = 16  # vLLM's --max-lora-rank where none is given


def check(words: list[str], needed: Mapping[str, files.Shape], has_table: files.HasTable) -> None:
    """Raise SettingError for an adapter that would not be applied whole.

    One whose files are not on this machine is checked when it is loaded.

    Args:
        words: flags of vLLM's, with those of a file.
        needed, has_table: of ``files.Model``.
    """
    named = list(_named(values_of(MODULES, words)))
    given = dict(named)
    if not given:
        return
    if "--enable-lora" not in map(usual, words):
        raise SettingError(f"{MODULES} is given without --enable-lora; give that as well.")
    _check_names([name for name, _ in named], values_of("--served-model-name", words))
    rank = value_of("--max-lora-rank", words) or ""
    most_rank = int(rank) if rank.isdecimal() else USUAL_RANK
    model = files.Model(needed, most_rank, has_table)
    for name, place in given.items():
        folder = Path(place).expanduser()
        if folder.is_dir():
            found = files.problem(folder, model)
        elif folder.is_absolute() or place.count("/") != 1:  # no model id
            found = f"is no folder at {place}; give the folder that PEFT saved."
        else:
            continue
        if found is not None:
            raise SettingError(f"{refusals.name_of(name)} {found}")


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
