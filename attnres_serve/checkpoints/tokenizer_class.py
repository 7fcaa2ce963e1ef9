"""The class that reads a checkpoint's tokenizer, determined from its files without running code.

If the class is code of the checkpoint, transformers silently reads the vocabulary with another
class, and splits texts differently than in training.
"""

import re
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from attnres_serve.checkpoints import kimi_tokenizer
from attnres_serve.checkpoints.files import read_object
from attnres_serve.errors import CheckpointError

CONFIG, FAST, TEKKEN = "tokenizer_config.json", "tokenizer.json", "tekken.json"
# Files of ranks, which do not state the pattern that splits texts.
RANKS = ("tiktoken.model", "*.tiktoken")
GENERAL = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
# The pattern with which transformers reads the ranks of any class.
_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Way(Enum):
    """The right reader of a tokenizer: transformers, transformers with a copy, or its code."""

    AS_IT_IS = "transformers"
    FAST_FILE = "tokenizer.json alone"
    KIMI = "a tokenizer.json of Kimi's ranks"
    OWN_CODE = "the checkpoint's code"


class Reading(NamedTuple):
    """The way to read a tokenizer.

    Attributes:
        way: the reader.
        why: the way and its reason, for people; empty if a file's name is enough.
    """

    way: Way
    why: str = ""


class Stated(NamedTuple):
    """The class that a checkpoint states.

    Attributes:
        name: with its module, if that is a file of the checkpoint.
        where: the file and the key.
        is_custom: whether its code is in the checkpoint.
    """

    name: str
    where: str
    is_custom: bool


def reading(folder: Path, runs_code: bool = False) -> Reading:
    """The way to read the tokenizer of a folder.

    Args:
        folder: of its files.
        runs_code: whether the checkpoint's code may be run (``--trust-remote-code``).

    Raises:
        CheckpointError: it would be read differently than in training, or a file is damaged.
    """
    stated = _stated(folder)
    has_fast = (folder / FAST).is_file()
    if stated is None or not stated.is_custom:
        return _of_transformers(folder, stated, has_fast)
    code = _code(folder, stated.name)
    if runs_code and code is not None:
        return Reading(Way.OWN_CODE, f"by {stated.name} of {stated.where}, code of the checkpoint")
    is_kimi = kimi_tokenizer.is_kimi_class(stated.name, code)
    if has_fast:
        if is_kimi:
            _check_kimi_file(folder, stated)
        return Reading(Way.FAST_FILE, f"without {stated.name} of {stated.where}, which it replaces")
    if is_kimi and (folder / kimi_tokenizer.RANKS_FILE).is_file():
        return Reading(Way.KIMI, f"with Kimi's pattern, because {stated.where} has {stated.name}")
    run = "" if code is None else ", with --trust-remote-code, which runs that code,"
    raise CheckpointError(
        f"the tokenizer of {folder} is {stated.name} by {stated.where}, a class of the "
        "checkpoint's own whose code is not run, and transformers would split texts by another "
        "class; put the same tokenizer beside the weights as a tokenizer.json, or start `serve` "
        f"with --tokenizer and a folder that has it{run} or with --skip-tokenizer-init, for token "
        "ids alone."
    )


def _of_transformers(folder: Path, stated: Stated | None, has_fast: bool) -> Reading:
    """The way to read a tokenizer of a transformers class, or of no stated class.

    Raises:
        CheckpointError: there are only tiktoken ranks, which state no pattern.
    """
    names_class = stated is not None and stated.name not in GENERAL
    ranks = next((file.name for kind in RANKS for file in sorted(folder.glob(kind))), None)
    if not has_fast and not names_class and ranks and not (folder / TEKKEN).is_file():
        raise CheckpointError(
            f"the tokenizer of {folder} is {ranks}, which says nothing of the pattern that splits "
            f"a text, and no class is stated in {CONFIG}; copy that file of the model's, whose "
            "auto_map names the class, or put the same tokenizer beside the weights as a "
            "tokenizer.json."
        )
    if has_fast or stated is None or not names_class:
        return Reading(Way.AS_IT_IS)
    return Reading(Way.AS_IT_IS, f"by transformers' {stated.name}, which {stated.where} names")


def _stated(folder: Path) -> Stated | None:
    """The class that a checkpoint states: by ``auto_map``, or else by its name."""
    files = [(name, _object(folder / name)) for name in (CONFIG, "config.json")]
    for name, content in files:
        for reference in _references(content.get("auto_map"), name == CONFIG):
            return Stated(reference, f"auto_map of {name}", True)
    for name, content in files:
        if isinstance(class_name := content.get("tokenizer_class"), str) and class_name:
            # With a tokenizer.json, transformers reads that file for an unknown class name.
            is_custom = not (folder / FAST).is_file() and not _is_known(class_name)
            is_custom = is_custom and not (folder / TEKKEN).is_file()
            return Stated(class_name, f"tokenizer_class of {name}", is_custom)
    return None


def _references(auto_map: Any, may_be_list: bool) -> Iterator[str]:
    """The classes of an ``auto_map``, in the order of transformers' preference."""
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    if isinstance(auto_map, list) and may_be_list:  # as older versions wrote it
        entry = auto_map
    listed = entry if isinstance(entry, list) else [entry]
    yield from (one for one in reversed(listed) if isinstance(one, str) and one)


def _is_known(name: str) -> bool:
    """Whether transformers has a tokenizer class of this name.

    Its table is searched as text first, because the import takes seconds.
    """
    package = find_spec("transformers")
    if package is None or package.origin is None or name in GENERAL:
        return True
    table = Path(package.origin).parent / "models" / "auto" / "tokenization_auto.py"
    names = {name, name.removesuffix("Fast"), f"{name}Fast"}
    listed = set(re.findall(r'"(\w+)"', table.read_text(encoding="utf-8")))
    if names & listed:
        return True
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return any(tokenizer_class_from_name(one) is not None for one in sorted(names))


def _code(folder: Path, name: str) -> str | None:
    """The source of a class ``module.Class``; empty for another repository's, None if missing."""
    if "--" in name:
        return ""
    module = name.rpartition(".")[0].replace(".", "/")
    path = folder / f"{module}.py"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _check_kimi_file(folder: Path, stated: Stated) -> None:
    """Refuse a tokenizer.json that transformers saved from Kimi's ranks with GPT-4's pattern.

    Raises:
        CheckpointError: this is such a file.
    """
    if _GPT_4 not in _strings(read_object(folder / FAST).get("pre_tokenizer")):
        return
    ranks = kimi_tokenizer.RANKS_FILE
    way = (
        "remove it, and" if (folder / ranks).is_file() else f"put Kimi's {ranks} in its place, and"
    )
    raise CheckpointError(
        f"{folder / FAST} splits texts with GPT-4's pattern, as transformers saves Kimi's ranks, "
        f"and {stated.where} has {stated.name}, which splits them with Kimi's; {way} the ranks are "
        "read with it."
    )


def _strings(content: Any) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(content, dict):
        content = [*content.values()]
    if isinstance(content, list):
        return [text for one in content for text in _strings(one)]
    return [content] if isinstance(content, str) else []


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
