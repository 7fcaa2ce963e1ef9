"""A trainer's tensors on their way: the files, what a worker keeps, and the sender."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import Pipe, get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.v1.worker.gpu_worker import Worker

from attnres_serve import WeightSender
from attnres_serve.compat import tensor_file
from attnres_serve.compat.weight_transfer import SharedMemoryEngine
from attnres_serve.compat.workarounds import replaced_weights
from attnres_serve.compat.workarounds.replaced_weights import (
    FINISH,
    INIT,
    PIECE,
    SHUTDOWN,
    START,
    STEPS,
)
from attnres_serve.errors import CheckpointError


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(tensor_file.tensors_of(str(path)))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the only one in which files may be."""
    for name in ("shared", "apart"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tensor_file, "_MEMORY", tmp_path / "shared")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "shared"))
    return tmp_path / "apart"


def test_where_a_file_may_be(apart: Path) -> None:
    """No other file of the machine is read, by a link neither, and none that never ends."""
    shared = apart.parent / "shared"
    save_file({"a": torch.ones(2)}, shared / "fine")
    assert read(shared / "fine")["a"].tolist() == [1, 1]
    (shared / "to apart").symlink_to(apart / "secret")
    os.mkfifo(shared / "pipe")
    save_file({"a": torch.ones(2)}, apart / "secret")
    for path, message in (
        (apart / "secret", "expected a file below"),
        (shared / "to apart", "expected a file below"),
        (shared / ".." / "apart" / "secret", "expected a file below"),
        (shared / "pipe", "expected a regular file"),
        (shared, "expected a regular file"),
        (shared / "gone", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot be read as tensors .*{message}"):
            read(path)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "file")
    result = read(tmp_path / "file")["a"]
    with (tmp_path / "file").open("r+b") as file:
        file.seek(-16, 2)
        file.write(bytes(16))
    assert result.tolist() == [1] * 4


SENT = [("a", torch.ones(2))]


def hold(pipe: Any) -> None:
    """Be a trainer that sends for ever."""
    with tensor_file.file_of(SENT) as path:
        pipe.send(path)
        time.sleep(600)


@contextmanager
def trainer() -> Iterator[Path]:
    """The file of another process, which is killed at the end."""
    ours, its = Pipe()
    process = get_context("fork").Process(target=hold, args=(its,), daemon=True)
    process.start()
    yield Path(ours.recv())
    process.kill()
    process.join()


@pytest.mark.parametrize("room", [1 << 30, 0], ids=["in memory", "in the temporary folder"])
def test_what_a_killed_trainer_left_goes_with_the_next_file(
    room: int, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of processes that live stay, and so does whatever else is there."""
    shared = apart.parent / "shared"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(apart))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=room))
    others = [f"{tensor_file._PREFIX}new", "tmp_another"]
    for place in (shared, apart):
        for name in others:
            (place / name).mkdir()
        (place / others[1] / "file").touch()
        (place / f"{tensor_file._PREFIX}link").symlink_to(place / others[1])
    with trainer() as living:
        with trainer() as killed:
            assert killed.is_relative_to(shared if room else apart)
        assert killed.exists() and living.exists()
        with tensor_file.file_of(SENT) as path:
            assert Path(path).exists() and living.exists() and not killed.parent.exists()
    with tensor_file.file_of(SENT):
        assert not living.parent.exists()
    for place in (shared, apart):
        assert {one.name for one in place.iterdir()} == {*others, f"{tensor_file._PREFIX}link"}
        assert (place / others[1] / "file").exists()


class Update:
    """Takes all but ``wrong``."""

    def __init__(self) -> None:
        self.applied = False

    def take(self, name: str, tensor: Any) -> None:
        if name == "wrong":
            raise CheckpointError("the tensor wrong is wrong.")

    def apply(self) -> None:
        raise OverflowError("no\nmemory")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, that receives weights of a trainer."""
    monkeypatch.setattr("vllm.config.set_current_vllm_config", nullcontext)
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.set_current_vllm_config", nullcontext)
    for name in STEPS:
        monkeypatch.setattr(Worker, name, getattr(Worker, name))
    replaced_weights.WORKERS[1].apply()
    engine = SharedMemoryEngine.__new__(SharedMemoryEngine)
    engine._default_model = engine._default_model_config = None  # type: ignore[assignment]
    result = SimpleNamespace(
        vllm_config=None,
        weight_transfer_engine=engine,
        _weight_update_active=False,
        _weight_update_is_draft=False,
        begun=[],
        model_runner=SimpleNamespace(reset_lora_state=lambda: None),
    )

    def begin(worker: Any, is_draft: bool, is_partial: bool) -> Update:
        result.begun.append(is_partial)
        return Update()

    model = SimpleNamespace(attn_res_base=None, attn_res_begin=begin)
    result.get_model = lambda: model
    for name in ("_check_weight_transfer_engine", "_start_weight_update"):
        setattr(result, name, getattr(Worker, name).__get__(result))
    result.step = lambda name, **given: getattr(Worker, name).__get__(result)(**given)["problem"]
    return result


def test_a_start_discards_what_was_begun(worker: Any, tmp_path: Path) -> None:
    """A trainer that is gone locks nothing, and leaves no tensors."""
    for name in (START, INIT, SHUTDOWN):
        assert worker.step(START) is None and worker.weight_transfer_engine.update is not None
        assert worker.step(name, **({"init_info": {}} if name == INIT else {})) is None
        assert (worker.weight_transfer_engine.update is None) == (name != START)
    assert worker.step(START) is None
    save_file({"wrong": torch.ones(1)}, tmp_path / "file")
    message = worker.step(PIECE, update_info={"path": str(tmp_path / "file")})
    assert message == "the tensor wrong is wrong."
    assert not worker._weight_update_active and worker.weight_transfer_engine.update is None


def test_what_is_partial_is_one_update(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("false", 1, None):
        assert "partial is " in worker.step(INIT, init_info={"partial": wrong})
    for end in (FINISH, SHUTDOWN):
        assert worker.step(INIT, init_info={"partial": True}) is None
        for name in (START, end, START):
            worker.step(name)
    assert worker.begun == [True, False] * 2
    monkeypatch.setattr(Update, "apply", lambda self: None)
    worker.step(INIT, init_info={"partial": True})
    worker.step(START)
    assert worker.step(FINISH) is None
    worker.step(START)
    assert worker.begun[-2:] == [True, False]


def test_a_fault_is_told_in_one_line(worker: Any) -> None:
    """The log has the rest."""
    worker.step(START)
    message = worker.step(FINISH)
    assert message.startswith("weights could not be replaced (OverflowError: no)")
    message = worker.step(INIT, init_info={"partly": True})
    assert "unexpected keyword argument 'partly'" in message and "\n" not in message


class Sender(WeightSender):
    """Asks no server; one route refuses."""

    def __init__(self, refuses: str | None = None) -> None:
        super().__init__("http://nowhere", partial=True)
        self.refuses, self.asked = refuses, []  # type: ignore[var-annotated]

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        self.asked.append(route.partition("?")[0])
        if self.asked[-1] == self.refuses:
            raise RuntimeError(f"{route} refused")
        return {}


def test_the_order_of_what_a_sender_asks() -> None:
    sender = Sender()
    sender.send([("a", torch.ones(1))])
    assert sender.asked == ["pause", INIT, START, PIECE, FINISH, "resume"]


@pytest.mark.parametrize("route", [INIT, START, PIECE, FINISH])
def test_a_sender_that_is_refused_ends_its_update(route: str) -> None:
    """The server resumes only if its weights are whole, which it knows."""
    sender = Sender(route)
    with pytest.raises(RuntimeError, match=f"^{route} refused"):
        sender.send([("a", torch.ones(1))])
    assert sender.asked[-3:] == [route, SHUTDOWN, "resume"]


def test_a_sender_without_tensors_pauses_nothing() -> None:
    """They are written first, as a trainer may fail to make them."""
    sender = Sender()
    with pytest.raises(CheckpointError):
        sender.send([("a", [1.0])])
    assert not sender.asked
