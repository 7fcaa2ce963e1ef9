"""Engines in processes of their own: started, asked in turn, stopped."""

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
# Values with which the model runs in workers.
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend")


@dataclass(frozen=True)
class Contender:
    """An engine to be measured.

    Attributes:
        name: what it is called in the results.
        flags: of vLLM's engine.
        algorithm: what its sites are to run, one of ``settings.ALGORITHMS`` or ``auto``; None for a
            model without sites.
        has_plugin: whether it is vLLM with our plugin.
        script: what runs it.
        drafts: tokens that are drafted for a step.
    """

    name: str
    flags: Sequence[str]
    algorithm: str | None = None
    has_plugin: bool = False
    script: Path = SCRIPT
    drafts: int = 0


def plain(name: str, model: Path, flags: Sequence[str], has_plugin: bool = False) -> Contender:
    """vLLM, stock or with our plugin, which serves ``model`` with standard residuals."""
    words = (f"--model={model}", *OURS, UNCOUNTED, *flags)
    return Contender(name, words, has_plugin=has_plugin)


def attnres(
    name: str,
    model: Path,
    flags: Sequence[str],
    chosen: Mapping[str, str],
    drafts: int | None = None,
) -> Contender:
    """vLLM with our plugin, which serves ``model`` by the settings ``chosen``.

    Args:
        name, model, flags: as of ``plain``.
        chosen: settings of ours, by their keys.
        drafts: tokens that ``flags`` have drafted for a step, 0 for the same engine without them;
            both count what is accepted, so that counting costs both the same.
    """
    own = [f"--additional-config={json.dumps(chosen)}"]
    if drafts is None:
        own.append(UNCOUNTED)
    elif not drafts:
        own.append("--speculative-config=None")
    algorithm = settings.choice(chosen, settings.ALGORITHM_KEY)
    words = (f"--model={model}", *OURS, *flags, *own)
    return Contender(name, words, algorithm, has_plugin=True, drafts=drafts or 0)


@dataclass
class Engine:
    """A running engine."""

    contender: Contender
    process: subprocess.Popen
    log: engine_log.EngineLog
    at_start: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.contender.name

    def wait(self) -> None:
        """Wait until it runs: its first answer comes unasked, of ``engine.Bench.facts``.

        Raises:
            SettingError: it did not start; the sentence has vLLM's reason.
        """
        if not self.at_start:
            self.at_start = self.receive()

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer of a method of ``engine.Bench``."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what ended it is told by the answer that does not come
            self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self.process.stdin.flush()
        return self.receive()

    def receive(self) -> Any:
        """The next answer."""
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
def running(contender: Contender, folder: Path) -> Iterator[Engine]:
    """An engine that starts, and is stopped with the context.

    Args:
        contender: what to start.
        folder: for what it compiles; one that is started there again loads that.
    """
    log = engine_log.EngineLog(f"bench-{contender.name}")
    try:
        with child.running(
            [sys.executable, "-P", str(contender.script), *contender.flags],
            # A cache of its own, so that none loads what another compiled.
            env=environment(contender, folder / "cache" / contender.name) | log.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.file,
            text=True,
        ) as process:
            yield Engine(contender, process, log)
    finally:
        if output.is_verbose():
            output.err().write(log.content.decode(errors="replace"))
        log.close()


def environment(contender: Contender, cache: Path) -> dict[str, str]:
    """The environment of an engine: caches apart from serving's and, on CPU, all cores.

    On CPU every engine keeps the memory that it frees, as a served model does: the faults by which
    it comes back differ from process to process.  vLLM binds threads and preloads OpenMP in worker
    processes only, so for an engine without those both are done here: without the preload torch and
    vLLM's kernels would each have a pool of threads.  It is before any other OpenMP, which may let
    the threads of one engine spin while the next is asked.
    """
    own = {
        "VLLM_PLUGINS": "attnres" if contender.has_plugin else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    if not device.is_cpu():
        return os.environ | own
    own |= malloc.keep_freed()
    asked = arguments.among(contender.flags)
    if not asked.has("kv_cache_memory_bytes"):
        # vLLM's default is half the memory, for each of them.
        own["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if not asked.has(*PARALLEL):
        torch = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
        openmp = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
        cores = os.sched_getaffinity(0)
        own |= {
            "OMP_NUM_THREADS": str(len(cores)),
            "GOMP_CPU_AFFINITY": " ".join(map(str, sorted(cores))),
            "LD_PRELOAD": ":".join([*map(str, openmp[:1]), os.environ.get("LD_PRELOAD", "")]),
        }
    return os.environ | own
