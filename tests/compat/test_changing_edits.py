"""Edits that change in a running engine: all workers have them, or the old ones, or none serves."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from attnres_serve.compat import changing_edits, decoder
from attnres_serve.compat.workarounds import replaced_weights, replacing_calls
from attnres_serve.compat.workarounds.replacing_calls import NotWholeError, OrderError
from attnres_serve.depth import static_edits
from attnres_serve.depth.edits import Edit
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.families import layout_of
from attnres_serve.model.config import spec_of
from attnres_serve.worker import WorkerExtension

QWEN = {"model_type": "attnres_qwen3", "num_hidden_layers": 3}
FIRST, SECOND = [Edit(mask=True, sources=["block 1"])], [Edit(mean=True)]
Fails = Callable[[int, list[dict[str, Any]]], str | None]


class Engine:
    """An engine of two workers, by the methods of vLLM's client."""

    def __init__(self, fails: Fails = lambda rank, edits: None, busy: bool = False) -> None:
        self.vllm_config = SimpleNamespace(additional_config=None)
        self.fails, self.workers, self.version = fails, [[], []], "one"
        self.empty, self.paused = 0, False
        self.output_processor = SimpleNamespace(
            has_unfinished_requests=lambda: busy, request_states={}, parent_requests={}
        )
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._pause, resume_scheduler_async=self._resume
        )

    async def _pause(self, **_: Any) -> None:
        self.paused = True

    async def _resume(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        return False

    async def abort(self, *_: Any, **__: Any) -> None:
        pass

    async def reset_prefix_cache(self, **_: Any) -> bool:
        self.empty += 1
        return True

    async def collective_rpc(self, method: str, args: Any) -> list[str | None]:
        assert self.paused and self.empty and hasattr(WorkerExtension, method)
        answers = [self.fails(rank, *args) for rank in range(2)]
        for rank, answer in enumerate(answers):
            if answer is None:
                (self.workers[rank],) = args
        return answers

    async def get_weight_version(self) -> str:
        return self.version

    async def update_weight_version(self, name: str) -> None:
        async def set_version(_: Any, version: str) -> None:
            self.version = version

        await changing_edits.PATCH.make(set_version)(self, name)


def change(engine: Any, edits: list[Edit]) -> None:
    asyncio.run(changing_edits.change(engine, edits))


def test_versions_count_changes() -> None:
    engine = Engine()
    for number, edits in enumerate((FIRST, SECOND, []), 1):
        change(engine, edits)
        assert engine.version == f"one+edits.{number}" and changing_edits.served(engine) == edits
        assert engine.workers[0] == engine.workers[1] and len(engine.workers[0]) == len(edits)
    asyncio.run(engine.update_weight_version("two"))
    assert engine.version == "two+edits.3"
    change(engine, FIRST)
    assert engine.version == "two+edits.4" and engine.empty == 4


def test_a_worker_that_fails_leaves_the_old_edits() -> None:
    engine = Engine(lambda rank, edits: "no" if rank and "mean" in edits[0] else None)
    change(engine, FIRST)
    with pytest.raises(SettingError, match=r"^no$"):
        change(engine, SECOND)
    assert changing_edits.served(engine) == FIRST and engine.version == "one+edits.1"
    assert "mask" in engine.workers[0][0] and engine.workers[0] == engine.workers[1]
    replacing_calls.check_whole(engine)
    assert not engine.paused


def test_workers_that_differ_serve_nothing() -> None:
    """Until a change succeeds; other weights do not help."""
    engine = Engine()
    change(engine, FIRST)
    asked: list[int] = []
    engine.fails = lambda rank, edits: (
        "no" if rank or asked.append(rank) or len(asked) > 1 else None
    )
    with pytest.raises(NotWholeError, match=r"^no$"):
        change(engine, SECOND)
    for _ in range(2):
        with pytest.raises(NotWholeError, match="may have different edits"):
            replacing_calls.check_whole(engine)
        replacing_calls.set_problem(engine, "target", None)
    engine.fails = lambda rank, edits: None
    change(engine, SECOND)
    replacing_calls.check_whole(engine)
    assert engine.version == "one+edits.2"


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (RuntimeError("a worker died"), NotWholeError, "a worker died"),
        (asyncio.CancelledError(), asyncio.CancelledError, "did not end"),
    ],
)
def test_a_call_without_an_end_serves_nothing(error: Any, raised: Any, said: str) -> None:
    def dies(rank: int, edits: Any) -> str | None:
        raise error

    engine = Engine(dies)
    with pytest.raises(raised, match=str(error) or None):
        change(engine, FIRST)
    with pytest.raises(NotWholeError, match=said):
        replacing_calls.check_whole(engine)


def test_a_request_that_comes_meanwhile_is_not_refused() -> None:
    """It waits for its turn."""
    engine = Engine(lambda rank, edits: replacing_calls.check_whole(engine))
    change(engine, FIRST)


def test_a_request_that_runs_is_not_disturbed() -> None:
    engine = Engine(busy=True)
    with pytest.raises(OrderError):
        change(engine, FIRST)
    assert engine.workers == [[], []]
    replacing_calls.check_whole(engine)


@pytest.mark.parametrize("is_first", [True, False])
def test_every_worker_changes(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "is_first_worker", lambda: is_first)
    changed: list[Any] = []
    spec = AttnResSpec(layout_of(QWEN), (0, 1, 3), 1e-6).to_house()
    config = SimpleNamespace(attn_res=spec, attn_res_config=QWEN)
    edited = SimpleNamespace(change=changed.append)
    model = SimpleNamespace(attn_res_edited=edited, config=config)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    wanted = static_edits.resolve(FIRST, spec_of(config))  # type: ignore[arg-type]
    assert WorkerExtension.attn_res_change_edits(worker, static_edits.to_json(FIRST)) is None
    assert changed == [wanted] and len(wanted) > 1
    said = WorkerExtension.attn_res_change_edits(worker, [{"mask": True, "sources": ["block 9"]}])
    assert said is not None and "block 9" in said and len(changed) == 1


def test_a_worker_never_raises() -> None:
    """What it says names no file; its caller has the other workers' answers."""
    found = WorkerExtension.attn_res_change_edits(SimpleNamespace(), [])  # type: ignore[arg-type]
    assert found == "edits could not be changed; the engine's log says why."


def test_an_engine_whose_edits_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(worker_extension_cls="attnres_serve.worker.WorkerExtension")
    asked = {"attnres_edits_change": "on"}
    on = SimpleNamespace(additional_config=asked, parallel_config=parallel)
    monkeypatch.setattr(replaced_weights, "fixed", lambda config: None)
    changing_edits.check_start(on)
    parallel.worker_extension_cls = "theirs"
    with pytest.raises(SettingError, match=r" whose workers have another extension .*; leave out"):
        changing_edits.check_start(on)
    monkeypatch.setattr(replaced_weights, "fixed", lambda config: "of this kind")
    with pytest.raises(SettingError, match=r"^edits cannot .* of this kind; leave out --enable-"):
        changing_edits.check_start(on)
    changing_edits.check_start(SimpleNamespace(additional_config={}))
