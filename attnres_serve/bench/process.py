"""Engines in separate processes: start, requests, stop."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnres_serve import output, settings
from attnres_serve.compat import arguments, device
from attnres_serve.compat.workarounds import malloc
from attnres_serve.errors import SettingError
from attnres_serve.start import child, engine_log

SCRIPT = Path(__file__).with_name("engine.py")
OURS = ("--no-enable-prefix-caching", "--skip-tokenizer-init")
UNCOUNTED = "--disable-log-stats"
# Flags with which the model runs in worker processes.
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend")


@dataclass(frozen=True)
class EngineSpec:
    """An engine to measure.

    Attributes:
        name: its name in the results.
        flags: the flags of vLLM's engine.
        algorithm: the algorithm of its sites, one of ``settings.ALGORITHMS`` or ``auto``; None for
            a model without sites.
        has_plugin: whether vLLM loads the plugin.
        script: the script that runs it.
        drafts: number of tokens drafted for a step.
    """

    name: str
    flags: Sequence[str]
    algorithm: str | None = None
    has_plugin: bool = False
    script: Path = SCRIPT
    drafts: int = 0


def plain(name: str, model: Path, flags: Sequence[str], has_plugin: bool = False) -> EngineSpec:
    """vLLM, stock or with the plugin, which serves ``model`` with standard residuals."""
    engine_flags = (f"--model={model}", *OURS, UNCOUNTED, *flags)
    return EngineSpec(name, engine_flags, has_plugin=has_plugin)


def attnres(
    name: str,
    model: Path,
    flags: Sequence[str],
    chosen: Mapping[str, str],
    drafts: int | None = None,
) -> EngineSpec:
    """vLLM with the plugin, which serves ``model`` with the settings ``chosen``.

    Args:
        name, model, flags: see ``plain``.
        chosen: settings of attnres-serve, by key.
        drafts: number of tokens that ``flags`` let it draft for a step, 0 for the same engine
            without drafts; both count accepted tokens, so that counting costs both the same.
    """
    more = [f"--additional-config={json.dumps(chosen)}"]
    if drafts is None:
        more.append(UNCOUNTED)
    elif not drafts:
        more.append("--speculative-config=None")
    algorithm = settings.choice(chosen, settings.ALGORITHM_KEY)
    engine_flags = (f"--model={model}", *OURS, *flags, *more)
    return EngineSpec(name, engine_flags, algorithm, has_plugin=True, drafts=drafts or 0)


@dataclass
class Engine:
    """A running engine."""

    spec: EngineSpec
    process: subprocess.Popen
    log: engine_log.EngineLog
    at_start: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    def wait(self) -> None:
        """Wait until it runs: its first message, without a request, is ``engine.Bench.facts``.

        Raises:
            SettingError: it did not start; the message has vLLM's reason.
        """
        if not self.at_start:
            self.at_start = self.receive()

    def ask(self, what: str, **arguments: Any) -> Any:
        """The result of a method of ``engine.Bench``."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # ``receive`` then reports the end of the engine
            self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self.process.stdin.flush()
        return self.receive()

    def receive(self) -> Any:
        """The next message."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.is_kept = True
            why = self.log.why(self.process.wait())
            raise SettingError(
                f"the engine of {self.name} ended ({why}); its log is {self.log.path}."
            )
        return json.loads(line)


@contextmanager
def running(spec: EngineSpec, folder: Path) -> Iterator[Engine]:
    """A starting engine, which is stopped with the context.

    Args:
        spec: the engine.
        folder: the folder for its compiled code, which later starts there load.
    """
    log = engine_log.EngineLog(f"bench-{spec.name}")
    try:
        with child.running(
            [sys.executable, "-P", str(spec.script), *spec.flags],
            # A separate cache, so that no engine loads another's compiled code.
            env=environment(spec, folder / "cache" / spec.name) | log.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.file,
            text=True,
        ) as process:
            yield Engine(spec, process, log)
    finally:
        if output.is_verbose():
            output.err().write(log.content.decode(errors="replace"))
        log.close()


def environment(spec: EngineSpec, cache: Path) -> dict[str, str]:
    """The environment of an engine: separate caches and, on CPU, all cores.

    On CPU every engine keeps freed memory, like a served model: the page faults for returned memory
    differ between processes.  vLLM binds threads and preloads OpenMP only in worker processes, so
    this does both for an engine without workers: without the preload, torch and vLLM's kernels
    would each have a pool of threads.  It comes before any other OpenMP, which could let the
    threads of one engine spin while the next one runs.
    """
    variables = {
        "VLLM_PLUGINS": "attnres" if spec.has_plugin else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    if not device.is_cpu():
        return os.environ | variables
    variables |= malloc.keep_freed()
    vllm_arguments = arguments.among(spec.flags)
    if not vllm_arguments.has("kv_cache_memory_bytes"):
        # vLLM's default is half of the memory for each engine.
        variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if not vllm_arguments.has(*PARALLEL):
        torch = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
        openmp = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
        cores = os.sched_getaffinity(0)
        variables |= {
            "OMP_NUM_THREADS": str(len(cores)),
            "GOMP_CPU_AFFINITY": " ".join(map(str, sorted(cores))),
            "LD_PRELOAD": ":".join([*map(str, openmp[:1]), os.environ.get("LD_PRELOAD", "")]),
        }
    return os.environ | variables
