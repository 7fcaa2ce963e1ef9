"""LoRA adapters that get other files while an engine runs."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attnres_serve.compat.workarounds import adapters_again
from attnres_serve.compat.workarounds.adapters_again import FILES, Contents, loading
from attnres_serve.errors import SettingError
from attnres_serve.lora import refusals

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

OTHER_FILES = r"^the LoRA adapter 'mine' has other files in .* under another name\.$"


def write(folder: Path, value: float = 1.0, rank: int = 4) -> Path:
    """An adapter; tensors and configuration can be changed one by one, and keep their sizes."""
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((8,), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    return folder


def test_the_cache_of_vllm_does_not_know_what_an_adapter_holds() -> None:
    """It tells blocks apart by name and path alone."""
    asked: Any = SimpleNamespace(lora_request=LoRARequest("mine", 7, "path"))
    assert _gen_lora_extra_hash_keys(asked) == [("lora", "mine", "path")]


@pytest.fixture
def known(tmp_path: Path) -> Contents:
    """The adapter ``mine`` of number 1 is known, from ``first``."""
    found = Contents()
    found.check("mine", 1, write(tmp_path / "first"))
    return found


def touched(folder: Path) -> Path:
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    return folder


def written_again(folder: Path) -> Path:
    shutil.rmtree(folder)
    return write(folder)


def more_files(folder: Path) -> Path:
    (folder / "README.md").write_text("of no meaning")
    return folder


def linked(first: Path) -> Path:
    first.with_name("link").symlink_to(first)
    return first.with_name("link")


SAME = {
    "the same": lambda first: first,
    "touched": touched,
    "written again": written_again,
    "another path": lambda first: write(first.with_name("copy")),
    "a link": linked,
    "other files beside": more_files,
    "no folder, which vLLM refuses": lambda first: first.with_name("nowhere"),
}


@pytest.mark.parametrize("how", SAME)
def test_the_same_content_is_taken(how: str, known: Contents, tmp_path: Path) -> None:
    """Also under the number that it gets when it was unloaded."""
    folder = SAME[how](tmp_path / "first")
    for number in (1, 2, 1):
        known.check("mine", number, folder)


def same_stamp_but_time(folder: Path) -> Path:
    """Other values in files of the same sizes and times of change."""
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    write(folder, 2.0)
    for path in folder.iterdir():
        os.utime(path, ns=(times[path.name],) * 2)
    return folder


def without_weights(folder: Path) -> Path:
    (folder / "adapter_model.safetensors").unlink()
    return folder


def as_pickle(folder: Path) -> Path:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    return folder


OTHERS = {
    "other tensors": lambda first: write(first, 2.0),
    "another rank": lambda first: write(first, rank=8),
    "other tensors, as if nothing had changed": same_stamp_but_time,
    "another path": lambda first: write(first.with_name("other"), 2.0),
    "a part of them": without_weights,
    "another kind of file": as_pickle,
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_content_is_refused(how: str, known: Contents, tmp_path: Path) -> None:
    """Under the name, by whatever number; under another name it is another adapter."""
    folder = OTHERS[how](tmp_path / "first")
    for number in (1, 2, 1):
        with pytest.raises(SettingError, match=OTHER_FILES):
            known.check("mine", number, folder)
    known.check("another", 3, folder)
    known.check("mine", 1, written_again(tmp_path / "first"))


def test_a_number_stands_for_one_name(known: Contents, tmp_path: Path) -> None:
    """Also where the content is the same: vLLM would not read it, and name the first one."""
    said = r"^the LoRA adapter 'another' has the number 1, which is that of 'mine'; .* own\.$"
    for folder in (tmp_path / "first", write(tmp_path / "other", 2.0), tmp_path / "nowhere"):
        with pytest.raises(SettingError, match=said):
            known.check("another", 1, folder)
    known.check("another", 2, tmp_path / "other")


def test_every_file_that_is_read_counts(tmp_path: Path) -> None:
    for name in FILES:
        known, folder = Contents(), tmp_path / name
        known.check("mine", 1, write(folder))
        (folder / name).write_bytes(b"other")
        with pytest.raises(SettingError, match=OTHER_FILES):
            known.check("mine", 1, folder)


def test_an_adapter_that_cannot_be_loaded_leaves_its_name_free(tmp_path: Path) -> None:
    owner, request = SimpleNamespace(), LoRARequest("mine", 1, "x")
    with pytest.raises(RuntimeError), loading(owner, request, write(tmp_path / "bad", 3.0)):
        raise RuntimeError
    with loading(owner, request, write(tmp_path / "good")):
        pass
    with pytest.raises(RuntimeError), loading(owner, request, tmp_path / "good"):
        raise RuntimeError  # as vLLM had no room for it
    with pytest.raises(SettingError, match=OTHER_FILES), loading(owner, request, tmp_path / "bad"):
        pytest.fail("it was loaded")


class Engine:
    """What vLLM's engines and their input processor have; remembers what reaches vLLM."""

    def __init__(self, **config: Any) -> None:
        model = SimpleNamespace(hf_config=SimpleNamespace(**config))
        self.vllm_config = SimpleNamespace(model_config=model)
        self.lora_config, self.tokenizer, self.input_processor = object(), None, self
        self.added: list[str] = []
        self.engine_core = SimpleNamespace(add_lora=self._add, add_lora_async=self._add_async)

    def _add(self, request: LoRARequest) -> bool:
        self.added.append(request.lora_path)
        return True

    async def _add_async(self, request: LoRARequest) -> bool:
        return self._add(request)

    def load(self, cls: Any, *request: Any, **more: Any) -> None:
        found = cls.add_lora(self, LoRARequest(*request, **more))
        assert asyncio.run(found) if asyncio.iscoroutine(found) else found

    def ask(self, *request: Any) -> None:
        InputProcessor._validate_lora(self, LoRARequest(*request))  # type: ignore[arg-type]


@pytest.fixture(params=[LLMEngine, AsyncLLM], ids=["sync", "async"])
def engine_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for cls, name in (
        *((InputProcessor, "_validate_lora"), (LLMEngine, "add_lora"), (AsyncLLM, "add_lora")),
    ):
        monkeypatch.setattr(cls, name, getattr(cls, name))
    for patch in adapters_again.PATCHES * 2:  # idempotent
        patch.apply()
    return request.param


def test_an_engine_refuses_other_files(engine_class: Any, tmp_path: Path) -> None:
    """When they are loaded, in place as well, and when they are asked; nothing reaches vLLM."""
    first, other = str(write(tmp_path / "first")), str(write(tmp_path / "other", 2.0))
    engine = Engine(attn_res_config={})
    engine.load(engine_class, "mine", 1, first)
    engine.ask("mine", 1, first)
    for number in (1, 2):
        with pytest.raises(SettingError, match=OTHER_FILES):
            engine.load(engine_class, "mine", number, other)
        with pytest.raises(SettingError, match=OTHER_FILES):
            engine.load(engine_class, "mine", number, other, load_inplace=True)
        with pytest.raises(SettingError, match=OTHER_FILES):
            engine.ask("mine", number, other)
    with pytest.raises(SettingError, match="has the number 1, which is that of 'mine'"):
        engine.ask("another", 1, other)
    engine.ask("mine", 1, first)
    write(tmp_path / "first", 3.0)
    with pytest.raises(SettingError, match=OTHER_FILES):
        engine.ask("mine", 1, first)
    assert engine.added == [first]
    engine.load(engine_class, "another", 2, other)


def test_an_engine_of_another_model_takes_what_it_took(engine_class: Any, tmp_path: Path) -> None:
    first, other = str(write(tmp_path / "first")), str(write(tmp_path / "other", 2.0))
    engine = Engine()
    for path in (first, other):
        engine.load(engine_class, "mine", 1, path)
        engine.ask("mine", 1, path)
    assert engine.added == [first, other]


def test_a_server_finds_the_sentence_in_what_its_engine_says(
    known: Contents, tmp_path: Path
) -> None:
    """So it answers 400 with it, as with other refusals of adapters."""
    for name, number, folder in (
        ("mine", 1, write(tmp_path / "other", 2.0)),
        ("another", 1, tmp_path / "other"),
    ):
        with pytest.raises(SettingError) as caught:
            known.check(name, number, folder)
        said = str(caught.value)
        assert refusals.refusal_in(said, name) == said
        wrapped = f"Call to add_lora method failed: {said}"
        assert refusals.refusal_in(wrapped, name) == said
