"""Ready, stopping, dead, and request ids: without an engine."""

import asyncio
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

pytest.importorskip("vllm")

from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import coordinator
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from attnres_serve.compat.workarounds import dead_engine, orphans
from attnres_serve.server import lifecycle, metrics
from attnres_serve.server.request_ids import RequestIds

pytestmark = pytest.mark.anyio


class Client:
    """An engine's client."""

    def __init__(self) -> None:
        self.errored = False
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=1))
        self.stopped: list[float | None] = []
        self.prompts: list = []

    async def answer(self) -> None:
        """What a request waits for."""

    async def generate(self, prompt, params, name: str):
        self.prompts.append((params.max_tokens, params.ignore_eos))
        await self.answer()
        for _ in range(params.max_tokens):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1], finish_reason="length")])

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped.append(timeout)


class Started:
    """A lifecycle that has begun, in a loop of its own; and an app behind its gate."""

    def __init__(self, delay: float = 0) -> None:
        self.client = Client()
        self.stopped = self.client.stopped
        self.state = SimpleNamespace(
            server=SimpleNamespace(
                should_exit=False, config=SimpleNamespace(timeout_graceful_shutdown=None)
            )
        )
        self.lifecycle = lifecycle.Lifecycle(delay)
        self.app = FastAPI()
        self.app.state.attn_res_lifecycle = self.lifecycle
        self.app.include_router(lifecycle.router)
        self.app.add_middleware(lifecycle.Gate, lifecycle=self.lifecycle)

        @self.app.get("/work")
        @self.app.get("/attn_res/{name}")
        async def work() -> int:
            return self.lifecycle.running

        self.http = TestClient(self.app)

    async def begin(self) -> "Started":
        await self.lifecycle.begin(self.client, self.state)
        return self

    def stop(self, seconds: float = 20) -> asyncio.Future[None]:
        """Shut the client down as vLLM does, in a thread."""
        return asyncio.get_running_loop().run_in_executor(None, self.client.shutdown, seconds)


async def within(seconds: float, condition) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


FAILED = "The request that warms up failed; the server's log says why."


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError, None), (VLLMValidationError, None), (EngineGenerateError, FAILED)],
)
async def test_a_model_whose_requests_need_more_is_served(error, reason):
    """Its warm-up is refused: there is nothing else to warm up with.  A fault is another thing."""

    async def refuse() -> None:
        raise error("an image is missing in /home/someone")

    started = Started()
    started.client.answer = refuse
    await started.begin()
    answer = started.http.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503 if reason else 200, reason)


async def test_an_engine_without_whole_weights_is_not_ready_and_refuses_work():
    """Whatever asks the model: 503 and the sentence.  What mends it is let through."""
    started = await Started().begin()
    paths = ("/v1/completions", "/v1/attn_res/trace", "/resume", "/start_weight_update", "/pause")
    for path in paths:
        started.app.post(path)(lambda: "done")
    assert all(started.http.post(path).status_code == 200 for path in paths)
    client = started.client
    client.attn_res_weights_problems = {"target": "no memory"}
    answer = started.http.get("/ready")
    assert answer.status_code == 503 and "(no memory)" in answer.json()["reason"]
    for path in paths[:3]:
        answer = started.http.post(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith("the weights of this engine are not")
    assert all(started.http.post(path).status_code == 200 for path in paths[3:])
    assert started.http.get("/work").status_code == 200
    client.attn_res_weights_problems = {}
    assert started.http.get("/ready").status_code == 200


def test_the_metric_of_weights_has_one_version():
    def told():
        (found,) = metrics.weights.collect()
        return {sample.labels["version"]: sample.value for sample in found.samples}

    assert told() == {"default": 0}
    for version, changed in (("one", 5.0), ("two", 7.0), ("two", 9.0), ("default", None)):
        metrics.tell_weights(version, changed)
        assert told() == {version: changed or 0}


async def test_a_long_warm_up_is_waited_for(monkeypatch):
    """The port is opened meanwhile, and /ready says what it waits for."""
    monkeypatch.setattr(lifecycle, "WARM_UP", 0.05)
    started = Started()
    ends = asyncio.Event()
    started.client.answer = ends.wait
    await started.begin()
    answer = started.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reason": "The server is warming up."}
    assert started.http.get("/work").status_code == 200
    ends.set()
    await within(5, lambda: started.http.get("/ready").status_code == 200)


async def test_a_request_was_served_before_the_port_is_open():
    """Of two tokens, whatever the first one is: a prefill and a decode."""
    started = await Started().begin()
    assert started.client.prompts == [(2, True)]
    answer = started.http.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reason": None})


def test_nobody_waits_for_those_who_need_no_key():
    """Who reads a file of the page slowly, or never to its end."""
    started = Started()
    assert started.http.get("/attn_res/page.js").json() == 0
    started.lifecycle.refusing = True
    assert started.http.get("/attn_res/page.js").status_code == 200
    assert started.http.get("/work").status_code == 503


async def test_stopping_refuses_new_requests_and_waits_for_those_that_run():
    started = await Started().begin()
    started.lifecycle.running = 1
    stop = started.stop()
    await within(5, lambda: started.lifecycle.refusing)
    refused = started.http.get("/work")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == 503
    assert int(refused.headers["retry-after"]) > 0
    answer = started.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reason": "The server is stopping."}
    await asyncio.sleep(0.2)
    assert not stop.done() and started.stopped == []
    started.lifecycle.running = 0
    await stop
    assert started.stopped == [lifecycle.GRACE]
    assert started.http.get("/ready").status_code == 503


class Clock:
    """Time that passes when a test says so, and all of it when a test has ended."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        stopped = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: time.sleep(0.001))
        monkeypatch.setattr(lifecycle, "time", stopped)

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None:
        self.now = math.inf  # a thread that waits would hold up the end of a test that fails


@pytest.mark.parametrize("delay", [1, 15, 3600])
async def test_new_requests_are_taken_during_the_delay_and_refused_after_it(monkeypatch, delay):
    """/ready says from the signal on that they should go elsewhere."""
    started = Started(delay)
    with Clock(monkeypatch) as clock:
        await started.begin()
        assert "connection" not in started.http.get("/work").headers
        started.lifecycle.running = 1
        stop = started.stop()
        await within(5, lambda: started.lifecycle.stopping)
        clock.now = delay - 0.5
        assert started.http.get("/ready").json()["reason"] == "The server is stopping."
        taken = started.http.get("/work")
        assert (taken.status_code, taken.headers["connection"]) == (200, "close")
        clock.now = delay
        await within(5, lambda: started.lifecycle.refusing)
        assert started.http.get("/work").status_code == 503
        clock.now = delay + 19.5  # the time of requests that run begins with the drain
        assert not stop.done()
        started.lifecycle.running = 0
        await stop
        assert started.stopped == [lifecycle.GRACE]


async def test_an_engine_that_dies_ends_the_delay():
    started = await Started(3600).begin()
    stop = started.stop()
    await within(5, lambda: started.lifecycle.stopping)
    started.client.errored = True
    with pytest.raises(SystemExit):
        await stop
    assert started.stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_aborts(monkeypatch, number):
    """In the delay too, in which new requests are taken."""
    ended: list[int] = []
    monkeypatch.setattr(lifecycle, "AGAIN", 0.01)
    monkeypatch.setattr(os, "_exit", ended.append)
    started = await Started(3600).begin()
    loop, stop = asyncio.get_running_loop(), started.stop()
    await within(5, lambda: number in loop._signal_handlers)
    assert started.http.get("/work").status_code == 200 and not ended
    os.kill(os.getpid(), number)
    await within(5, lambda: ended == [128 + number])
    started.client.errored = True
    with pytest.raises(SystemExit):
        await stop


async def test_it_waits_no_longer_than_it_may():
    started = await Started().begin()
    started.lifecycle.running = 1
    begin = time.monotonic()
    await started.stop(0.3)
    # Not for ever, which is how long a request runs here.
    assert 0.3 <= time.monotonic() - begin < lifecycle.GRACE
    started.client.shutdown(20)  # as vLLM does again when the server has ended
    assert started.stopped == [0, 20]


async def test_a_dead_engine_ends_the_server_with_a_status(monkeypatch):
    monkeypatch.setattr(lifecycle, "FAREWELL", 0.05)
    started = await Started().begin()
    server = started.state.server
    await within(5, lambda: server.config.timeout_graceful_shutdown == lifecycle.GRACE)
    assert not server.should_exit
    started.client.errored = True
    answer = started.http.get("/ready").json()
    assert answer == {"ready": False, "reason": "The engine crashed."}
    await within(5, lambda: server.should_exit)
    with pytest.raises(SystemExit) as ended:
        started.client.shutdown(20)
    assert ended.value.code == 1 and started.stopped


async def test_a_dead_engine_ends_calls_of_its_methods(monkeypatch):
    """vLLM fails its requests alone, and lets a trace, say, wait for ever."""
    monkeypatch.setattr(lifecycle, "LOOK", 0.01)
    started = Started()
    calls = {number: asyncio.get_running_loop().create_future() for number in range(3)}
    calls[0].set_result("answered")
    started.client.engine_core = SimpleNamespace(utility_results=calls)
    await started.begin()
    await asyncio.sleep(0.1)
    assert not calls[1].done()
    started.client.errored = True
    await within(5, lambda: all(call.done() for call in calls.values()))
    assert calls[0].result() == "answered"
    assert all(isinstance(calls[n].exception(), EngineDeadError) for n in (1, 2))


def test_a_request_of_a_dead_engine_may_be_repeated_elsewhere():
    """503 with Retry-After, on a connection that ends; other errors stay what they are."""
    started = Started()
    for patch in dead_engine.PATCHES:
        patch.apply()
    state = started.app.state
    state.args = SimpleNamespace(log_error_stack=False)
    state.server, state.engine_client = started.state.server, started.client
    started.client.is_running = True
    init_exception_handler(started.app)
    errors = {"dead": EngineDeadError(), "wrong": ValueError("wrong")}

    @started.app.get("/raise/{name}")
    async def refuse(name: str) -> None:
        raise errors[name]

    asyncio.run(started.begin())
    assert started.http.get("/raise/wrong").status_code == 400
    started.client.errored = True
    answer = started.http.get("/raise/dead")
    assert answer.status_code == answer.json()["error"]["code"] == 503
    assert answer.json()["error"]["message"] == dead_engine.sentence()
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["connection"] == "close"
    answer = started.http.get("/raise/wrong")
    assert answer.status_code == 400 and "retry-after" not in answer.headers


@pytest.mark.parametrize("end", ["killed", "reaped", "stopping", "killed before a stop"])
def test_a_server_sees_the_end_of_an_engine_that_runs_beside_it(end, monkeypatch):
    """Else the launcher of several would see it alone, and stop them; in a stop it is no news."""
    monkeypatch.setattr(lifecycle, "LOOK", 60 if end == "killed before a stop" else 0.01)
    monkeypatch.setattr(os, "getppid", os.getpid)
    words = ["EngineCore_DP1", "-c", "import time; time.sleep(60)"]
    started, queue = Started(), asyncio.Queue()
    started.client.vllm_config.parallel_config._api_process_count = 2
    core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False), outputs_queue=queue)
    started.client.engine_core = core

    async def main(engine: subprocess.Popen) -> None:
        await started.begin()
        await asyncio.sleep(0.2)
        assert queue.empty()
        started.lifecycle.stopping = end == "stopping"
        engine.kill()
        if end != "killed":
            engine.wait()
        if end == "stopping":
            await asyncio.sleep(0.2)
            assert queue.empty() and not core.resources.engine_dead
        else:
            if end == "killed before a stop":
                await asyncio.to_thread(started.lifecycle.drain, 0)
            assert isinstance(await asyncio.wait_for(queue.get(), 5), EngineDeadError)
            assert core.resources.engine_dead

    with subprocess.Popen(words, executable=sys.executable) as engine:
        asyncio.run(main(engine))


async def test_the_server_outlives_its_engine_where_vllm_is_told_so(monkeypatch):
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    monkeypatch.setattr(lifecycle, "FAREWELL", 0.0)
    monkeypatch.setattr(lifecycle, "LOOK", 0.01)
    started = await Started().begin()
    started.client.errored = True
    await asyncio.sleep(0.2)
    assert not started.state.server.should_exit


# --- a process ends with its parent

FAMILY = """
import multiprocessing, sys, time
from attnres_serve.compat.workarounds.orphans import end_with_parent

def child(pipe):
    end_with_parent()
    end_with_parent()
    pipe.send(None)
    time.sleep(60)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(theirs,))
    process.start()
    ours.recv()
    print(process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_ends_with_its_parent(method, tmp_path):
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    parent = subprocess.Popen(
        [sys.executable, str(script), method],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end, "it outlived its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("name", "ends"),
    [("EngineCore_DP1", True), ("VllmWorker-0", True), ("ApiServer_1", True), ("Worker", False)],
)
def test_only_processes_of_vllm_end_with_their_parent(name, ends, monkeypatch):
    monkeypatch.setattr(
        orphans.multiprocessing, "current_process", lambda: SimpleNamespace(name=name)
    )
    assert orphans.is_process_of_vllm() is ends


def test_the_coordinator_of_data_parallel_engines_ends_with_its_parent(monkeypatch):
    """Forked, it finds ours in the place of vLLM's function; spawned, it is told ours by name."""
    done = []
    vllms = staticmethod(lambda *args, **options: done.append((args, options)))
    monkeypatch.setattr(coordinator.DPCoordinatorProc, "run_coordinator", vllms)
    monkeypatch.setattr(orphans, "_COORDINATE", None)
    monkeypatch.setattr(orphans, "end_with_parent", lambda: done.append("watched"))
    for _ in range(2):
        orphans.PATCH.apply()
    started = coordinator.DPCoordinatorProc.run_coordinator
    assert pickle.loads(pickle.dumps(started)) is started
    started(1, engine_count=2)
    monkeypatch.setattr(coordinator.DPCoordinatorProc, "run_coordinator", vllms)
    monkeypatch.setattr(orphans, "_COORDINATE", None)
    started()
    assert done == ["watched", ((1,), {"engine_count": 2}), "watched", ((), {})]


# --- request ids


@pytest.mark.parametrize("name", ["order-7", None, "", "x" * 129, "with a blank", "tab\there"])
def test_an_id_is_kept_or_made(name):
    """One that is missing, or of no use, is made, another one for each request."""
    app = FastAPI()

    @app.get("/")
    async def root(request: lifecycle.Request) -> str:
        return request.headers["x-request-id"]

    app.add_middleware(RequestIds)
    headers = {} if name is None else {"X-Request-Id": name}
    answers = [TestClient(app).get("/", headers=headers) for _ in range(2)]
    assert all(one.headers.get_list("x-request-id") == [one.json()] for one in answers)
    first, second = (answer.json() for answer in answers)
    is_made = len(first) == len(second) == 32 and first != second
    assert is_made if name != "order-7" else first == second == name


# --- counts of the workers


def test_only_what_is_new_is_counted():
    def count() -> float:
        return metrics.passes.labels("of_the_test", "eager")._value.get()

    for total in (3, 3, 10, 4):  # a restarted worker begins anew
        metrics.count_passes({"of_the_test": {"eager": total}})
    assert count() == 10
    metrics.count_passes({"of_the_test": {"eager": 6}})
    assert count() == 12
