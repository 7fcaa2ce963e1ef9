"""LoRA adapters that get other files while an engine runs."""

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnres_serve.compat.workarounds import adapters_again
from attnres_serve.compat.workarounds.adapters_again import FILES, Contents, contents, loading
from attnres_serve.errors import SettingError
from attnres_serve.lora import refusals

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

from tests.compat.faults.adapters_again import write

OTHER_FILES = r"^the LoRA adapter 'mine' has other files in .* load it again, in place or under"
UNREAD = (
    r"^the LoRA adapter 'mine' has other files in .* than workers read under its number 1; load"
)
STILL_USED = r"^the LoRA adapter 'mine' has other files in .*, and requests that use it still run; "


def test_the_cache_of_vllm_does_not_know_what_an_adapter_holds() -> None:
    """It tells blocks apart by name and path alone."""
    asked: Any = SimpleNamespace(lora_request=LoRARequest("mine", 7, "path"))
    assert _gen_lora_extra_hash_keys(asked) == [("lora", "mine", "path")]


@pytest.fixture
def known(tmp_path: Path) -> Contents:
    """The adapter ``mine`` of number 1 is known, from ``first``."""
    result = Contents()
    result.check("mine", 1, write(tmp_path / "first"))
    return result


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
    message = r"^the LoRA adapter 'another' has the number 1, which is that of 'mine'; .* own\.$"
    for folder in (tmp_path / "first", write(tmp_path / "other", 2.0), tmp_path / "nowhere"):
        with pytest.raises(SettingError, match=message):
            known.check("another", 1, folder)
    known.check("another", 2, tmp_path / "other")


def test_every_file_that_is_read_counts(tmp_path: Path) -> None:
    for name in FILES:
        known, folder = Contents(), tmp_path / name
        known.check("mine", 1, write(folder))
        (folder / name).write_bytes(b"other")
        with pytest.raises(SettingError, match=OTHER_FILES):
            known.check("mine", 1, folder)


@pytest.mark.parametrize("how", OTHERS)
def test_other_content_is_loaded_where_workers_read_it(
    how: str, known: Contents, tmp_path: Path
) -> None:
    """By a number that they do not know, or in place; then requests get the key of that content."""
    first = known.loads["mine"].content
    folder = OTHERS[how](tmp_path / "first")
    with pytest.raises(SettingError, match=UNREAD):
        known.load("mine", 1, folder)
    for number, in_place in ((2, False), (1, True)):
        with pytest.raises(SettingError, match=STILL_USED):
            known.load("mine", number, folder, in_place, is_used=True)
        known.load("mine", number, folder, in_place)
        known.check("mine", number, folder)
        assert known.loads["mine"].content != first
        back = write(tmp_path / f"back {number}")
        with pytest.raises(SettingError, match=OTHER_FILES):
            known.check("mine", number, back)
        known.load("mine", number, back, in_place=True)
        assert known.loads["mine"].content == first


def test_the_same_content_is_loaded_again_while_it_is_used(known: Contents, tmp_path: Path) -> None:
    for in_place in (False, True):
        known.load("mine", 1, write(tmp_path / "first"), in_place, is_used=True)


def test_a_number_of_an_earlier_load_is_no_way_around(known: Contents, tmp_path: Path) -> None:
    """Workers still have under it what they read then."""
    other = write(tmp_path / "other", 2.0)
    known.load("mine", 2, other)
    for number, folder in ((1, other), (1, tmp_path / "first"), (2, tmp_path / "first")):
        with pytest.raises(SettingError, match=OTHER_FILES):
            known.check("mine", number, folder)
    known.check("mine", 2, other)


def test_an_adapter_that_cannot_be_loaded_leaves_its_name_free(tmp_path: Path) -> None:
    owner, request = SimpleNamespace(), LoRARequest("mine", 1, "x")
    in_place = LoRARequest("mine", 1, "x", load_inplace=True)
    with pytest.raises(RuntimeError), loading(owner, request, write(tmp_path / "bad", 3.0)):
        raise RuntimeError
    with loading(owner, request, write(tmp_path / "good")):
        pass
    for again, folder in ((request, "good"), (in_place, "bad")):
        with pytest.raises(RuntimeError), loading(owner, again, tmp_path / folder):
            raise RuntimeError  # as vLLM had no room for it
    with pytest.raises(SettingError, match=UNREAD), loading(owner, request, tmp_path / "bad"):
        pytest.fail("it was loaded")
    contents(owner).check("mine", 1, tmp_path / "good")


class Engine:
    """What vLLM's engines and their input processor have; remembers what reaches vLLM."""

    def __init__(self, **config: Any) -> None:
        model = SimpleNamespace(hf_config=SimpleNamespace(**config))
        self.vllm_config = SimpleNamespace(model_config=model)
        self.lora_config, self.tokenizer, self.input_processor = object(), None, self
        self.output_processor = SimpleNamespace(request_states={})
        self.added: list[str] = []
        self.engine_core = SimpleNamespace(add_lora=self._add, add_lora_async=self._add_async)

    def _add(self, request: LoRARequest) -> bool:
        self.added.append(request.lora_path)
        return True

    async def _add_async(self, request: LoRARequest) -> bool:
        return self._add(request)

    def load(self, cls: Any, *request: Any, **more: Any) -> None:
        result = cls.add_lora(self, LoRARequest(*request, **more))
        assert asyncio.run(result) if asyncio.iscoroutine(result) else result

    def ask(self, *request: Any) -> None:
        InputProcessor._validate_lora(self, LoRARequest(*request))  # type: ignore[arg-type]


@pytest.fixture(params=[LLMEngine, AsyncLLM], ids=["sync", "async"])
def engine_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for cls, name in (
        *((InputProcessor, "_validate_lora"), (InputProcessor, "process_inputs")),
        *((LLMEngine, "add_lora"), (AsyncLLM, "add_lora")),
    ):
        monkeypatch.setattr(cls, name, getattr(cls, name))
    for patch in adapters_again.PATCHES * 2:  # idempotent
        patch.apply()
    return request.param


def test_an_engine_answers_with_what_was_loaded_last(engine_class: Any, tmp_path: Path) -> None:
    """By another number or in place; what workers would not read does not reach them."""
    first, other = str(write(tmp_path / "first")), str(write(tmp_path / "other", 2.0))
    engine = Engine(attn_res_config={})
    engine.load(engine_class, "mine", 1, first)
    engine.ask("mine", 1, first)
    with pytest.raises(SettingError, match=UNREAD):
        engine.load(engine_class, "mine", 1, other)
    with pytest.raises(SettingError, match=OTHER_FILES):
        engine.ask("mine", 1, other)
    engine.load(engine_class, "mine", 2, other)
    engine.ask("mine", 2, other)
    with pytest.raises(SettingError, match=OTHER_FILES):
        engine.ask("mine", 1, first)
    engine.output_processor.request_states["running"] = SimpleNamespace(lora_name="mine")
    with pytest.raises(SettingError, match=STILL_USED):
        engine.load(engine_class, "mine", 2, first, load_inplace=True)
    engine.output_processor.request_states["running"] = SimpleNamespace(lora_name="another")
    engine.load(engine_class, "mine", 2, first, load_inplace=True)
    with pytest.raises(SettingError, match="has the number 1, which is that of 'mine'"):
        engine.ask("another", 1, other)
    engine.ask("mine", 2, first)
    write(tmp_path / "first", 3.0)
    with pytest.raises(SettingError, match=OTHER_FILES):
        engine.ask("mine", 2, first)
    assert engine.added == [first, other, first]


@pytest.mark.parametrize("salt", [None, "of the request"])
def test_the_cache_tells_contents_apart(salt: str | None, tmp_path: Path) -> None:
    """Requests of one content share blocks, also of several loads; nothing is read in each step."""
    keys = []
    owner: Any = Engine(attn_res_config={})
    for number, value in ((1, 1.0), (1, 2.0), (2, 1.0)):
        folder = write(tmp_path / "adapter", value)
        adapter = LoRARequest("mine", number, str(folder), load_inplace=True)
        with loading(owner, adapter, folder):
            pass
        plain = SimpleNamespace(lora_request=adapter, cache_salt=salt)
        made = adapters_again._processing(lambda *_: plain)(owner)  # noqa: B023
        assert not made.lora_request.load_inplace and adapter.load_inplace
        keys.append(made.cache_salt)
    assert keys[0] == keys[2] != keys[1] and all((salt or "") in key for key in keys)
    none = SimpleNamespace(lora_request=None, cache_salt=salt)
    assert adapters_again._processing(lambda *_: none)(owner).cache_salt == salt


def test_an_engine_of_another_model_takes_what_it_took(engine_class: Any, tmp_path: Path) -> None:
    first, other = str(write(tmp_path / "first")), str(write(tmp_path / "other", 2.0))
    engine = Engine()
    for path in (first, other):
        engine.load(engine_class, "mine", 1, path)
        engine.ask("mine", 1, path)
    assert engine.added == [first, other]


def test_a_server_finds_the_sentence_in_what_its_engine_says(known, tmp_path: Path) -> None:
    """So it answers 400 with it, as with other refusals of adapters."""
    other = write(tmp_path / "other", 2.0)
    for name in ("mine", "another"):
        with pytest.raises(SettingError) as caught:
            known.check(name, 1, other)
        message = str(caught.value)
        assert refusals.refusal_in(message, name) == message
        wrapped = f"Call to add_lora method failed: {message}"
        assert refusals.refusal_in(wrapped, name) == message
