"""LoRA adapters that get other files while an engine runs.

vLLM 0.32 tells adapters apart by a number, and in the prefix cache by name and path.  Other files
under an old name are answered from the cache of the old ones, or not read at all while the number
is the old one; and an adapter that was evicted is read again with whatever its folder holds then.
So a name stands for the content that it had first, as long as an engine runs.

This can go with a vLLM whose ``InputProcessor`` gives requests a key of what their adapter holds.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnres_serve.compat import engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.errors import SettingError
from attnres_serve.lora import refusals
from attnres_serve.lora.files import CONFIG, WEIGHTS

FILES = (CONFIG, *WEIGHTS)
Stamp = tuple[tuple[str, int, int, int, int], ...]


@dataclass
class _Seen:
    """What an adapter held: when its files were looked at, and their hash."""

    stamp: Stamp
    content: bytes


@dataclass
class Contents:
    """The adapters of one engine, by name and by number, as they were first.

    Attributes:
        seen: what the files of each held, by name.
        names: of each, by its number.
    """

    seen: dict[str, _Seen] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def check(self, name: str, number: int, folder: Path) -> None:
        """Remember an adapter, or raise SettingError if it is another than under its name before.

        Args:
            name: what it is called.
            number: vLLM's, ``lora_int_id``.
            folder: its files; where there is none, vLLM says so.
        """
        if self.names.setdefault(number, name) != name:
            raise SettingError(
                f"{refusals.name_of(name)} has the number {number}, which is that of "
                f"{self.names[number]!r}; give each adapter a number of its own."
            )
        if not (stamp := _stamp(folder)):
            return
        known = self.seen.get(name)
        if known is not None and known.stamp == stamp:
            return
        content = _content(folder)
        if known is not None and known.content != content:
            raise SettingError(
                f"{refusals.name_of(name)} has other files in {folder} than when it was first "
                "loaded, and answers would mix both; load them under another name."
            )
        self.seen[name] = _Seen(stamp, content)


def _stamp(folder: Path) -> Stamp:
    """What changes with the files of an adapter, without reading them."""
    found = ((path.name, path.stat()) for path in _files(folder))
    return tuple((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in found)


def _content(folder: Path) -> bytes:
    found = hashlib.sha256()
    for path in _files(folder):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.digest()


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / name).is_file()]


@contextmanager
def loading(owner: Any, request: Any, folder: Path) -> Iterator[None]:
    """Check an adapter that is about to be loaded; one that cannot be leaves its name free.

    Args:
        owner: an object of vLLM's that an engine has one of, which remembers the adapters.
        request: vLLM's ``LoRARequest``.
        folder: its files.

    Raises:
        SettingError: it is another than under its name before.
    """
    known: Contents = vars(owner).setdefault("attn_res_adapters", Contents())
    name, number = request.lora_name, request.lora_int_id
    is_new, has_new_number = name not in known.seen, number not in known.names
    try:
        known.check(name, number, folder)
        yield
    except BaseException:
        if is_new:
            known.seen.pop(name, None)
        if has_new_number:
            known.names.pop(number, None)
        raise


def _validating(validate: Any) -> Any:
    def _validate_lora(self, lora_request):
        validate(self, lora_request)
        if lora_request is not None and engine_config.has_attn_res(self.vllm_config):
            with loading(self, lora_request, _folder(lora_request)):
                pass

    return _validate_lora


def _adding(add: Any) -> Any:
    def add_lora(self, lora_request):
        if not engine_config.has_attn_res(self.vllm_config):
            return add(self, lora_request)
        with loading(self.input_processor, lora_request, _folder(lora_request)):
            return add(self, lora_request)

    return add_lora


def _adding_async(add: Any) -> Any:
    async def add_lora(self, lora_request):
        if not engine_config.has_attn_res(self.vllm_config):
            return await add(self, lora_request)
        with loading(self.input_processor, lora_request, _folder(lora_request)):
            return await add(self, lora_request)

    return add_lora


def _folder(request: Any) -> Path:
    return Path(request.lora_path).expanduser()


# Engines of AttnRes models refuse other files under an old name.
PATCHES = tuple(
    Patch(
        targets=(target,),
        make=make,
        why="other files under the name of an adapter were answered from the cache of the first "
        "ones",
        models="AttnRes models with `--enable-lora`",
        first=(0, 28),
    )
    for target, make in {
        "vllm.v1.engine.input_processor:InputProcessor._validate_lora": _validating,
        "vllm.v1.engine.llm_engine:LLMEngine.add_lora": _adding,
        "vllm.v1.engine.async_llm:AsyncLLM.add_lora": _adding_async,
    }.items()
)
