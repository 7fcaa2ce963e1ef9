"""Engines and workers of our server fork on CPU, with the cores of their server."""

import gc
import multiprocessing
import os
from multiprocessing.context import ForkProcess

import pytest
from vllm import plugins
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor

from attnres_serve.compat.workarounds import forked_processes

PLACES = utils, multiproc_executor


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in PLACES:
        monkeypatch.setattr(place, "get_mp_context", None)
    monkeypatch.setattr(plugins, "plugins_loaded", True)


@pytest.mark.parametrize(
    ("preloaded", "forks"),
    [
        ("/venv/lib/libiomp5.so", True),
        ("/a/libtcmalloc.so:/venv/lib/libiomp5.so", True),
        ("/usr/lib/libgomp.so.1", False),
        ("/a/libtcmalloc.so", False),
        (None, False),
    ],
)
def test_they_fork_beside_intels_openmp_alone(
    preloaded: str | None, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GNU's reads its cores when it is loaded, which is before a fork."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    if preloaded:
        monkeypatch.setenv("LD_PRELOAD", preloaded)
    forked_processes.begin_imported()
    assert [place.get_mp_context is not None for place in PLACES] == [forks] * 2


@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1", "VllmWorker-0"])
def test_a_fork_loads_plugins_and_an_engine_has_the_cores_of_its_server(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libiomp5.so")
    forked_processes.begin_imported()
    cores = os.sched_getaffinity(0)
    bound, inherited = {min(cores)}, [[]]  # which no collection is to look at again
    begin, run = ForkProcess._bootstrap, multiprocessing.process.BaseProcess.run

    def bind(self, *args: object, **options: object) -> int:
        os.sched_setaffinity(0, bound)  # as OpenMP does in a fork
        return begin(self, *args, **options)

    def found(self) -> None:
        frozen = all(one is not inherited for one in gc.get_objects())
        self._write.send((plugins.plugins_loaded, frozen, os.sched_getaffinity(0)))
        run(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "run", found)
    monkeypatch.setattr(forked_processes._Process, "_bootstrap", bind)
    read, write = multiprocessing.Pipe(duplex=False)
    context = utils.get_mp_context()
    process = context.Process(target=int, name=name)
    process._write = write
    process.start()
    assert read.poll(60)
    assert read.recv() == (False, True, cores if name.startswith("Engine") else bound)
    process.join(60)
    assert process.exitcode == 0
