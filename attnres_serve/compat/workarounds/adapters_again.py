"""LoRA adapters whose files change while an engine runs.

vLLM 0.32 identifies adapters by a number, and in the prefix cache by name and path.  New files
under an old name are answered from the cache of the old ones, or are not read if the number is the
same. An evicted adapter is read again from whatever its folder contains then.  So the prefix cache
gets a key of an adapter's content at load, and requests whose adapter has changed are refused.

Remove this with a vLLM whose ``InputProcessor`` adds the adapter's content to the cache key.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnres_serve.compat import engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.errors import SettingError
from attnres_serve.lora import refusals
from attnres_serve.lora.files import CONFIG_FILE, WEIGHTS_FILES

FILES = (CONFIG_FILE, *WEIGHTS_FILES)
Stamp = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True)
class _Load:
    """The content of an adapter at load: the stamp of its files, and their hash."""

    stamp: Stamp
    content: bytes


@dataclass
class Contents:
    """The adapters of one engine, as loaded last.

    Attributes:
        loads: loads by name.
        names: names by number.
        held: the content that workers may have under a number.
    """

    loads: dict[str, _Load] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    held: dict[int, bytes] = field(default_factory=dict)

    def load(
        self, name: str, number: int, folder: Path, in_place: bool = False, is_used: bool = False
    ) -> None:
        """Record the content of an adapter that is being loaded.

        Args:
            name: its name.
            number: vLLM's ``lora_int_id``.
            folder: its folder; if missing, vLLM reports it.
            in_place: whether workers read it even if they have one with its number.
            is_used: whether running requests use an adapter with its name.

        Raises:
            SettingError: workers would not read it, or requests would mix both contents.
        """
        self._bind(name, number)
        if not (stamp := _stamp(folder)):
            return
        content, known = _content(folder), self.loads.get(name)
        if not in_place and self.held.get(number, content) != content:
            raise SettingError(
                f"{refusals.name_of(name)} has other files in {folder} than workers read under its "
                f"number {number}; load it with load_inplace, or under another number."
            )
        if known is not None and known.content != content and is_used:
            raise SettingError(
                f"{refusals.name_of(name)} has other files in {folder}, and requests that use it "
                "still run; wait for them, or load the files under another name."
            )
        self.loads[name], self.held[number] = _Load(stamp, content), content

    def check(self, name: str, number: int, folder: Path) -> None:
        """Raise SettingError if the adapter of a request has changed since it was loaded.

        An adapter that was not loaded yet is loaded by its first request.
        """
        self._bind(name, number)
        stamp, known = _stamp(folder), self.loads.get(name)
        if not stamp:
            return
        if known is None:
            self.load(name, number, folder)
            return
        content = known.content if known.stamp == stamp else _content(folder)
        if content != known.content or self.held.get(number, content) != content:
            raise SettingError(
                f"{refusals.name_of(name)} has other files in {folder} than when it was loaded; "
                "load it again, in place or under another name."
            )
        self.loads[name], self.held[number] = _Load(stamp, content), content

    def _bind(self, name: str, number: int) -> None:
        if self.names.setdefault(number, name) != name:
            raise SettingError(
                f"{refusals.name_of(name)} has the number {number}, which is that of "
                f"{self.names[number]!r}; give each adapter a number of its own."
            )


def _stamp(folder: Path) -> Stamp:
    """Metadata that changes with the files of an adapter, without reading them."""
    stats = ((path.name, path.stat()) for path in _files(folder))
    return tuple((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats)


def _content(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for path in _files(folder):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / name).is_file()]


def contents(owner: Any) -> Contents:
    """The adapters recorded on a vLLM object; an engine has one such object."""
    return vars(owner).setdefault("attn_res_adapters", Contents())


@contextmanager
def loading(owner: Any, request: Any, folder: Path, is_used: bool = False) -> Iterator[None]:
    """Record an adapter while it is loaded; a failure restores the previous records.

    It is recorded before it reaches a worker, because later requests reach the worker later.

    Args:
        owner: as in ``contents``.
        request: vLLM's ``LoRARequest``.
        folder: of its files.
        is_used: whether running requests use an adapter with its name.

    Raises:
        SettingError: as in ``Contents.load``.
    """
    known, name, number = contents(owner), request.lora_name, request.lora_int_id
    places: list[tuple[dict[Any, Any], Any]]
    places = [(known.loads, name), (known.names, number), (known.held, number)]
    before = [of.get(key) for of, key in places]
    try:
        known.load(name, number, folder, request.load_inplace, is_used)
        yield
    except BaseException:
        for (of, key), value in zip(places, before, strict=True):
            of.pop(key, None)
            if value is not None:
                of[key] = value
        raise


def _load(engine: Any, request: Any) -> AbstractContextManager[None]:
    """Record an adapter that an engine loads."""
    running = engine.output_processor.request_states.values()
    is_used = any(state.lora_name == request.lora_name for state in running)
    return loading(engine.input_processor, request, _folder(request), is_used)


def _processing(process: Any) -> Any:
    """Add the adapter's content to the cache key; no later step loads it in place again."""

    def process_inputs(self, *args, **kwargs):
        made = process(self, *args, **kwargs)
        adapter = made.lora_request
        if adapter is not None and engine_config.has_attn_res(self.vllm_config):
            if (load := contents(self).loads.get(adapter.lora_name)) is not None:
                made.cache_salt = f"{made.cache_salt or ''} adapter {load.content.hex()}"
            if adapter.load_inplace:  # a flag of the loading request
                made.lora_request = copy(adapter)
                made.lora_request.load_inplace = False
        return made

    return process_inputs


def _validating(validate: Any) -> Any:
    def _validate_lora(self, lora_request):
        validate(self, lora_request)
        if lora_request is not None and engine_config.has_attn_res(self.vllm_config):
            adapter = lora_request
            contents(self).check(adapter.lora_name, adapter.lora_int_id, _folder(adapter))

    return _validate_lora


def _adding(add: Any) -> Any:
    def add_lora(self, lora_request):
        if not engine_config.has_attn_res(self.vllm_config):
            return add(self, lora_request)
        with _load(self, lora_request):
            return add(self, lora_request)

    return add_lora


def _adding_async(add: Any) -> Any:
    async def add_lora(self, lora_request):
        if not engine_config.has_attn_res(self.vllm_config):
            return await add(self, lora_request)
        with _load(self, lora_request):
            return await add(self, lora_request)

    return add_lora


def _folder(request: Any) -> Path:
    return Path(request.lora_path).expanduser()


# Engines of AttnRes models answer with the files loaded last.
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
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs": _processing,
        "vllm.v1.engine.llm_engine:LLMEngine.add_lora": _adding,
        "vllm.v1.engine.async_llm:AsyncLLM.add_lora": _adding_async,
    }.items()
)
