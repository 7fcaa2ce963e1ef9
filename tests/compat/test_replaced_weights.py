"""Weights that are replaced in a running engine: what is refused, and what happens around it."""

import asyncio
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnres_serve.compat import device, tensor_file, versions
from attnres_serve.compat.device import Kind
from attnres_serve.compat.workarounds import replaced_weights, replacing_calls
from attnres_serve.compat.workarounds.replaced_weights import (
    BACKEND,
    FILE,
    FINISH,
    FROM_ENGINE,
    INIT,
    RELOAD,
    SHUTDOWN,
    START,
    STEPS,
)
from attnres_serve.compat.workarounds.replacing_calls import (
    BUSY,
    OTHERS,
    NotWholeError,
    OrderError,
)
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES

pytest.importorskip("vllm")

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

NEW_ENGINE = "; start a new engine with the new weights."


def parallel(engines: int = 1, servers: int = 1) -> SimpleNamespace:
    return SimpleNamespace(data_parallel_size=engines, world_size=1, _api_process_count=servers)


def made_up(**more: Any) -> Any:
    """A configuration of vLLM's in which weights can be replaced, but for what is said."""
    config = SimpleNamespace(architectures=[FAMILIES["llama"].architecture], attn_res_config={})
    defaults = {
        "lora_config": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "cache_config": SimpleNamespace(kv_offloading_size=None),
        "weight_transfer_config": SimpleNamespace(backend=BACKEND),
        "load_config": SimpleNamespace(load_format="auto"),
        "parallel_config": parallel(),
        "model_config": SimpleNamespace(
            hf_config=config, quantization=more.pop("quantization", None), model="started"
        ),
    }
    return SimpleNamespace(**defaults | more)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    monkeypatch.setattr("vllm.config.set_current_vllm_config", nullcontext)
    monkeypatch.setattr(versions, "is_older_than", lambda other: False)


SOME: Any = object()
REASONS = (
    ("with weights quantized by fp8", {"quantization": "fp8"}),
    ("with LoRA adapters", {"lora_config": SOME}),
    ("with a KV connector, which would keep what the old", {"kv_transfer_config": SOME}),
    (
        "with a KV connector, which would",
        {"cache_config": SimpleNamespace(kv_offloading_size=1.0)},
    ),
    ("of several replicas", {"parallel_config": parallel(engines=2)}),
    ("behind several API servers", {"parallel_config": parallel(servers=2)}),
    *(
        (f"with --load-format {name}", {"load_config": SimpleNamespace(load_format=name)})
        for name in ("pt", "sharded_state", "runai_streamer")
    ),
)


@pytest.mark.parametrize(("reason", "more"), REASONS, ids=[reason for reason, _ in REASONS])
def test_an_engine_whose_weights_are_not_replaced(reason: str, more: dict[str, Any]) -> None:
    result = replaced_weights.problem(made_up(**more))
    assert result is not None and result.endswith(NEW_ENGINE) and "\n" not in result
    assert result.startswith(f"weights cannot be replaced in a running engine {reason}")
    with pytest.raises(SettingError, match=re.escape(reason)):
        replaced_weights.check_start(made_up(**more))
    replaced_weights.check_start(made_up(**more | {"weight_transfer_config": None}))


def test_an_engine_whose_weights_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced_weights.problem(made_up()) is None
    for load_format in ("safetensors", "dummy"):
        result = made_up(load_config=SimpleNamespace(load_format=load_format))
        assert replaced_weights.problem(result) is None
    assert replaced_weights.problem(made_up(quantization="compressed-tensors")) is None
    monkeypatch.setattr(versions, "is_older_than", lambda other: True)
    assert "of a vLLM before 0.32" in str(replaced_weights.problem(made_up()))
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    assert "on a GPU, where that was never tried" in str(replaced_weights.problem(made_up()))


def test_an_engine_that_receives_weights_of_a_trainer() -> None:
    replaced_weights.check_start(made_up())
    for backend in ("nccl", "ipc"):
        config = made_up(weight_transfer_config=SimpleNamespace(backend=backend))
        with pytest.raises(SettingError, match=f"^--weight-transfer-config asks for {backend}, .*"):
            replaced_weights.check_start(config)


# Methods of a worker that read weights, or that vLLM's own start calls; on a CPU none changes them.
READ = {"compute_weight_checksums", "supports_draft_weight_updates"}


def test_every_method_that_changes_weights_is_known() -> None:
    """A vLLM that has another one must be looked at."""
    named = {name for name in dir(CPUWorker) if re.search("weight|load_model|config$", name)}
    public = {name for name in named if not name.startswith("_")}
    assert public - {"initialize_from_config"} == {RELOAD, *STEPS, *OTHERS, *READ}


class Engine:
    """What both of vLLM's engines have, of an AttnRes model; remembers what is asked in order."""

    def __init__(
        self,
        config: Any,
        busy: bool = False,
        empties: bool = True,
        paused: bool = False,
        answers: Any = ((None, ()),),
    ) -> None:
        self.vllm_config, self.empties, self.paused = config, empties, paused
        self.running = ["a request"] if busy else []
        self.output_processor = SimpleNamespace(
            has_unfinished_requests=lambda: bool(self.running),
            request_states={},
            parent_requests={},
        )
        self.asked: list[Any] = []
        self.answers = answers
        self.engine_core = SimpleNamespace(
            collective_rpc=self._rpc,
            collective_rpc_async=self._rpc_async,
            reset_prefix_cache=self._reset,
            reset_prefix_cache_async=self._reset_async,
            pause_scheduler_async=self._pause,
            resume_scheduler_async=self._resume,
        )

    async def is_paused(self) -> bool:
        return self.paused

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and not clear_cache
        self.paused = True

    async def _resume(self) -> None:
        self.paused = False

    async def abort(self, names: list[str], internal: bool) -> None:
        self.asked.append("abort")

    def _rpc(self, method: Any, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        self.asked.append((method, kwargs))
        self.read = load_file(kwargs[FILE]) if kwargs and FILE in kwargs else None
        if method not in (RELOAD, *STEPS):
            return ["done"]
        if isinstance(self.answers, Exception):
            raise self.answers
        if self.is_async and method in (RELOAD, FINISH):
            is_ours = hasattr(self.vllm_config.model_config.hf_config, "attn_res_config")
            assert self.paused or not is_ours
        return [{"problem": message, "broken": broken} for message, broken in self.answers]

    def _reset(self, running: bool = False, *_: Any) -> bool:
        self.asked.append("reset all" if running else "reset")
        return self.empties

    async def _rpc_async(self, *given: Any) -> list[Any]:
        return self._rpc(*given)

    async def _reset_async(self, *given: Any) -> bool:
        return self._reset(*given)

    def calls(self, cls: Any) -> Callable[..., Any]:
        """``collective_rpc`` of one of vLLM's engines."""
        self.is_async = cls is AsyncLLM
        for name in ("reset_prefix_cache", "collective_rpc"):
            setattr(self, name, getattr(cls, name).__get__(self))
        return plain(cls.collective_rpc.__get__(self))


def plain(method: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result

    return call


@pytest.fixture(params=[LLMEngine, AsyncLLM], ids=["sync", "async"])
def engine_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for cls in (LLMEngine, AsyncLLM):
        for name in ("collective_rpc", "sleep", "add_request"):
            monkeypatch.setattr(cls, name, getattr(cls, name))
    for name in ("check_admission", "resume_generation"):
        monkeypatch.setattr(AsyncLLM, name, getattr(AsyncLLM, name))
    for patch in replacing_calls.CLIENTS * 2:  # idempotent
        patch.apply()
    return request.param


def started(cls: Any, **given: Any) -> Engine:
    """An engine that has begun an update."""
    answers = given.pop("answers", None)
    engine = Engine(made_up(), **given)
    engine.calls(cls)(START)
    engine.answers = answers or engine.answers
    engine.asked.clear()
    return engine


def test_the_order_of_calls(engine_class: Any) -> None:
    """What comes too early or too late is not sent; what workers refuse ends an update."""
    engine = Engine(made_up())
    call = engine.calls(engine_class)
    for method in ("update_weights", FINISH):
        with pytest.raises(OrderError, match=f"^{method} is for an update that was started"):
            call(method)
    for method in (INIT, START, "update_weights", "update_weights"):
        call(method)
    with pytest.raises(OrderError, match=f"^{RELOAD} cannot come within an update"):
        call(RELOAD)
    assert [asked[0] for asked in engine.asked] == [INIT, START, *["update_weights"] * 2]
    for method in (SHUTDOWN, INIT):  # gives it up
        call(method)
        with pytest.raises(OrderError):
            call(FINISH)
        call(START)
        call(START)  # discards what was begun
    engine.answers = ((None, ()), (WRONG, ()))
    with pytest.raises(SettingError, match=WRONG):
        call("update_weights")
    assert engine.asked[-1] == (SHUTDOWN, {})  # the worker that took it gives it up, too
    with pytest.raises(OrderError):
        call(FINISH)
    engine.answers = ((None, ()),)
    for method in (START, FINISH, RELOAD):
        call(method)


def test_arguments_that_no_worker_gets(engine_class: Any) -> None:
    engine = started(engine_class)
    call = engine.calls(engine_class)
    with pytest.raises(SettingError, match=r"^update_info is a list"):
        call("update_weights", kwargs={"update_info": [{"path": "x"}]})
    with pytest.raises(SettingError, match=r"^update_info is a list"):
        call("update_weights", args=([{"path": "x"}],))
    other = Engine(made_up())
    for name in ("path", FILE, FROM_ENGINE):
        with pytest.raises(SettingError, match=f"^{RELOAD} has no argument {name}"):
            other.calls(engine_class)(RELOAD, kwargs={name: "x"})
    assert not engine.asked and not other.asked


def test_a_trace_behind_an_update_that_fails_is_no_answer(engine_class: Any) -> None:
    """It was sent while the weights were whole, and ran when they no longer were."""
    engine = Engine(made_up())

    def fail(*given: Any) -> list[Any]:
        setattr(engine, replacing_calls._PROBLEMS, {"target": "no memory"})
        return ["a trace"]

    async def fail_async(*given: Any) -> list[Any]:
        return fail(*given)

    engine.engine_core.collective_rpc = fail
    engine.engine_core.collective_rpc_async = fail_async
    with pytest.raises(NotWholeError, match="no memory"):
        engine.calls(engine_class)("attn_res_trace")


def test_calls_do_not_interleave() -> None:
    """Of two that begin together the second one waits for the first one's end."""
    for patch in replacing_calls.CLIENTS:
        patch.apply()
    engine = Engine(made_up())
    engine.calls(AsyncLLM)
    order: list[str] = []

    async def slow(method: Any, *given: Any) -> list[Any]:
        order.append(f"begin {method}")
        await asyncio.sleep(0.01)
        order.append(f"end {method}")
        return [{"problem": None, "broken": ()}]

    engine.engine_core.collective_rpc_async = slow

    async def both() -> None:
        result: Any = engine
        await asyncio.gather(result.collective_rpc(START), result.collective_rpc("update_weights"))

    asyncio.run(both())
    steps = (START, "update_weights")
    assert order == [f"{what} {step}" for step in steps for what in ("begin", "end")]


@pytest.mark.parametrize("method", OTHERS)
def test_other_ways_are_refused(method: str, engine_class: Any) -> None:
    """Before anything is sent; a model of vLLM's own takes what it took."""
    ours = Engine(made_up())
    with pytest.raises(SettingError, match=f"^{method} is not supported with AttnRes.*weights[.]$"):
        ours.calls(engine_class)(method)
    assert not ours.asked
    vllms = made_up()
    del vllms.model_config.hf_config.attn_res_config
    other = Engine(vllms)
    assert other.calls(engine_class)(method) == ["done"] and other.asked == [(method, None)]
    other.calls(engine_class)(RELOAD)
    assert other.asked[1:] == [(RELOAD, None)]


@pytest.mark.parametrize("method", [RELOAD, FINISH])
def test_the_cache_is_emptied_before_weights_are_replaced(method: str, engine_class: Any) -> None:
    """What is asked meanwhile is computed with the new ones, and may be kept."""
    engine = started(engine_class) if method == FINISH else Engine(made_up())
    assert engine.calls(engine_class)(method) == [None]
    assert engine.asked == ["reset", (method, {FROM_ENGINE: True} if method == RELOAD else {})]
    engine = Engine(made_up())
    engine.calls(engine_class)("attn_res_executed")
    engine.calls(engine_class)(START)
    assert engine.asked == [("attn_res_executed", None), (START, {})]


def test_weights_are_not_replaced_under_requests(engine_class: Any) -> None:
    lora = made_up(lora_config=SOME)
    for engine, asked in (
        (Engine(made_up(), busy=True), []),
        (Engine(made_up(), empties=False), ["reset"]),
        (Engine(lora), []),
    ):
        with pytest.raises(SettingError) as caught:
            engine.calls(engine_class)(RELOAD)
        assert engine.asked == asked
        assert str(caught.value) == (replaced_weights.problem(engine.vllm_config) or BUSY)


def test_paused_requests_begin_again() -> None:
    """They keep nothing that old weights computed."""
    for patch in replacing_calls.CLIENTS:
        patch.apply()
    engine = started(AsyncLLM, busy=True, paused=True)
    engine.calls(AsyncLLM)(FINISH)
    assert engine.asked == ["reset all", (FINISH, {})]


def test_an_engine_that_receives_no_weights(engine_class: Any) -> None:
    for method in STEPS:
        engine: Any = Engine(made_up(weight_transfer_config=None))
        with pytest.raises(SettingError, match=f"^{method} needs an engine that receives weights"):
            engine.calls(engine_class)(method)
        assert not engine.asked


def test_tensors_for_other_processes_go_in_a_file(engine_class: Any) -> None:
    """Parts of one tensor too; the file is gone afterwards."""
    table = torch.arange(12.0).view(3, 4)
    sent = {"a": table[1:], "b": table, "c": table.T, "d": table[0, 0]}
    engine = Engine(made_up())
    engine.calls(engine_class)(RELOAD, args=(iter(sent.items()),))
    assert engine.read is not None and engine.read.keys() == sent.keys()
    assert all(torch.equal(engine.read[name], tensor) for name, tensor in sent.items())
    path = engine.asked[-1][1][FILE]
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        [*tensor_file.tensors_of(path)]
    for wrong, message in (([("a", 1)], "is a int"), ([("a", table)] * 2, "comes twice")):
        with pytest.raises(CheckpointError, match=message):
            engine.calls(engine_class)(RELOAD, kwargs={"weights_iterator": wrong})


WRONG = "the tensor x holds nan"
WHOLE, TORN = (), ("target",)
ENDS: Any = (
    (((None, WHOLE), (None, WHOLE)), None, False),
    (((WRONG, WHOLE), (WRONG, WHOLE)), WRONG, False),  # before a weight was touched
    (((WRONG, WHOLE), (None, WHOLE)), WRONG, True),  # workers differ
    (((WRONG, TORN),), WRONG, True),
)


def torn(engine: Engine, cls: Any) -> None:
    """An engine that serves nothing, by each way to ask it."""
    calls = [lambda: plain(cls.add_request.__get__(engine))("1", {"prompt_token_ids": [3]}, None)]
    calls.append(lambda: engine.calls(cls)("attn_res_trace"))
    if cls is AsyncLLM:
        calls.append(lambda: plain(AsyncLLM.resume_generation.__get__(engine))())
        calls.append(lambda: AsyncLLM.check_admission(engine))  # type: ignore[arg-type]
    for call in calls:
        with pytest.raises(NotWholeError, match=r"are not whole, .*; no request is served"):
            call()


@pytest.mark.parametrize(("answers", "message", "is_broken"), ENDS)
def test_what_workers_answer(
    answers: Any, message: Any, is_broken: bool, engine_class: Any
) -> None:
    """Weights that are not whole serve nothing, until all were replaced."""
    engine = Engine(made_up(), answers=answers)
    call = engine.calls(engine_class)
    with nullcontext() if message is None else pytest.raises(SettingError, match=f"^{message}$"):
        call(RELOAD)
    assert not engine.paused
    if not is_broken:
        replacing_calls.check_whole(engine)
        return
    assert ("abort" in engine.asked) == (engine_class is AsyncLLM)
    torn(engine, engine_class)
    engine.answers = ((None, WHOLE),) * len(answers)
    call(RELOAD)
    replacing_calls.check_whole(engine)


STEPS_AFTER = (INIT, START, "update_weights", SHUTDOWN, "start_draft_weight_update", FINISH)


def test_a_further_step_does_not_make_weights_whole(engine_class: Any) -> None:
    """Nor an update of the draft; one of the target does."""
    engine = started(engine_class, answers=((WRONG, TORN),))
    call = engine.calls(engine_class)
    engine.answers = ((WRONG, TORN),)
    with pytest.raises(SettingError):
        call(FINISH)
    torn(engine, engine_class)
    engine.answers = ((None, TORN),)
    for method in STEPS_AFTER:
        call(method)
        torn(engine, engine_class)
    call(START)
    engine.answers = ((None, WHOLE),)
    call(FINISH)
    replacing_calls.check_whole(engine)


def test_a_draft_that_is_not_whole(engine_class: Any) -> None:
    engine = Engine(made_up())
    call = engine.calls(engine_class)
    call("start_draft_weight_update")
    engine.answers = ((WRONG, ("draft",)),)
    with pytest.raises(NotWholeError):
        call(FINISH)
    engine.answers = ((None, ("draft",)),)
    call(RELOAD)  # of the target alone
    with pytest.raises(NotWholeError, match="the weights of the draft"):
        replacing_calls.check_whole(engine)
    call("start_draft_weight_update")
    engine.answers = ((None, WHOLE),)
    call(FINISH)
    replacing_calls.check_whole(engine)


@pytest.mark.parametrize("method", [RELOAD, START])
def test_workers_that_do_not_answer(method: str, engine_class: Any) -> None:
    """What they have is not known then."""
    engine = Engine(made_up(), answers=TimeoutError("late"))
    with pytest.raises(TimeoutError):
        engine.calls(engine_class)(method)
    torn(engine, engine_class)
    assert not engine.paused
    engine.answers = ((None, WHOLE),)
    engine.calls(engine_class)(RELOAD)
    replacing_calls.check_whole(engine)


@pytest.mark.parametrize(
    ("kind", "level", "message"),
    [
        (Kind.CPU, 1, "frees no memory on a CPU"),
        (Kind.CPU, 2, "frees no memory on a CPU"),
        (Kind.CUDA, 2, "discards the weights"),
    ],
)
def test_sleep(
    kind: Kind, level: int, message: str, engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "kind", lambda: kind)
    with pytest.raises(SettingError, match=f"^sleep level {level} {message}"):
        plain(engine_class.sleep.__get__(Engine(made_up())))(level)


class Model:
    """Remembers what it is given."""

    attn_res_base: Any = None

    def __init__(self) -> None:
        self.read: list[str | None] = []
        self.taken: list[Any] = []

    def attn_res_read(self, worker: Any, folder: str | None) -> None:
        self.read.append(folder)

    def attn_res_begin(self, worker: Any, is_partial: bool = False) -> Any:
        self.taken.append(is_partial)
        return SimpleNamespace(
            take=lambda *pair: self.taken.append(pair),
            apply=lambda: self.taken.append("applied"),
        )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, of an AttnRes model whose weights can be replaced."""
    result = SimpleNamespace(
        vllm_config=made_up(), model_config=made_up().model_config, model=Model(), asked=[]
    )
    result.get_model = lambda: result.model

    def own(self: Any, *given: Any) -> None:
        self.asked.append(given)

    monkeypatch.setattr(Worker, RELOAD, own)
    for _ in range(2):  # idempotent
        replaced_weights.WORKERS[0].apply()
    result.call = Worker.reload_weights.__get__(result)
    return result


def test_a_worker_reads_folders_and_tensors(worker: Any) -> None:
    fine = {"problem": None, "broken": []}
    assert worker.call(weights_path="new", attn_res_from_engine=True) == fine
    assert worker.call(attn_res_from_engine=True) == fine  # the folder that it was started with
    assert worker.model.read == ["new", None]
    assert worker.call(iter([("a", 1)]), attn_res_from_engine=True) == fine
    assert worker.call([], is_partial=True, attn_res_from_engine=True) == fine
    assert worker.model.taken == [False, ("a", 1), "applied", True, "applied"]
    assert not worker.asked


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("reload_weights was called in a worker", {"weights_path": "new"}),
        ("leave is_checkpoint_format out", {"is_checkpoint_format": False, FROM_ENGINE: True}),
        ("is_partial is 'no'", {"is_partial": "no", "weights_iterator": [], FROM_ENGINE: True}),
    ],
)
def test_what_a_worker_refuses(message: str, given: dict[str, Any], worker: Any) -> None:
    """It answers and does not raise, so that no reply is left in a queue."""
    result = worker.call(**given)
    assert message in result["problem"] and not result["broken"]
    assert not worker.asked and not worker.model.read


def test_a_worker_that_fails_says_so(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(owner: Any, folder: str) -> None:
        owner.attn_res_broken = {"target"}
        raise OSError("disk\nfull")

    monkeypatch.setattr(worker.model, "attn_res_read", fails)
    result = worker.call(weights_path="new", attn_res_from_engine=True)
    assert "(OSError: disk)" in result["problem"] and result["broken"] == ["target"]


def test_a_worker_of_another_model_takes_what_it_took(worker: Any) -> None:
    worker.model = object()
    worker.call("tensors", None, False)
    assert worker.asked == [("tensors", None, False)]
