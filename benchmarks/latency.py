"""End-to-end latency of AttnRes against the same model with standard residuals in stock vLLM.

    python -m benchmarks.latency --out benchmarks/results/cpu-latency.json
    python -m benchmarks.latency --shape 768x12 --rounds 30 --control
    python -m benchmarks.latency --quick              does it work: tiny model, three rounds

Engines are started one after the other and stay up: ``baseline`` (a Llama; no plugin is loaded in
its process) and one for each algorithm (the same Llama with eight blocks), on CPU, compiled, bf16,
dummy weights, no prefix cache, no tokenizer.  They are then asked in turn, one at a time, every
round in another order; in a round all get the same fresh random prompts.

* prefill: seconds for one prompt of 512 tokens and its first output token
* decode: seconds per step, from 33 output tokens less those for 1, at batch 1 and 8

A ratio is AttnRes / baseline within a round; its median over the rounds has a bootstrap interval.
That interval knows the noise between rounds, not the luck of a process (where its memory lies);
``--control`` adds a second baseline, whose ratio would be 1 without it.

The passes that the sites counted must be those of the measurement, all compiled.  The last line on
stdout is one JSON document; the table goes to stderr.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tqdm import tqdm

from attnres_serve.settings import ALGORITHMS
from benchmarks.common import ROOT, cores, median_interval, paired_ratios, publish

BASELINE = "baseline"
CONTROL = "control"
STOCK = (BASELINE, CONTROL)
ENGINES = (BASELINE, *ALGORITHMS)
DISCARDED = 2  # rounds before those that count
WARM = 4  # tokens of the request that begins a turn: the others have had the caches


@dataclass(frozen=True)
class Shape:
    """A Llama; ``block_size`` in sublayers makes eight blocks."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    block_size: int
    vocab: int = 32000

    def config(self, attn_res: bool) -> dict[str, Any]:
        """The content of config.json, with standard residuals or in the house format."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 1024,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }
        if attn_res:
            config["architectures"] = ["AttnResLlamaForCausalLM"]
            config["model_type"] = "attnres_llama"
            config["attn_res"] = {"block_size": self.block_size}
        return config


SHAPES = {
    "768x12": Shape(768, 12, heads=12, kv_heads=12, intermediate=2048, block_size=3),
    "1024x28": Shape(1024, 28, heads=16, kv_heads=8, intermediate=3072, block_size=7),
}
QUICK = {"128x4": Shape(128, 4, heads=2, kv_heads=1, intermediate=256, block_size=1, vocab=512)}


@dataclass(frozen=True)
class Phase:
    """``tokens`` are those of the prompt in prefill and the steps in decode."""

    name: str
    batch: int
    tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.tokens if self.name == "prefill" else 32

    @property
    def passes(self) -> int:
        """Forward passes of one measurement."""
        return 1 if self.name == "prefill" else 1 + (1 + self.tokens)


PHASES = (Phase("prefill", 1, 512), Phase("decode", 1, 32), Phase("decode", 8, 32))
PASSES = WARM + sum(phase.passes for phase in PHASES)  # in a turn
Prompts = list[list[int]]
Samples = dict[tuple[Phase, str], list[float]]


@dataclass
class Engine:
    """A running engine.

    Attributes:
        name: one of ``ENGINES``, or ``CONTROL``.
        process: its process.
        start_s: seconds that making the engine took, compilation included.
        idle: shares of a core that it used between its turns.
    """

    name: str
    process: subprocess.Popen
    log: Path
    start_s: float = 0.0
    idle: list[float] = field(default_factory=list)
    _left: tuple[float, float] | None = None

    def receive(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(f"the engine {self.name} ended:\n{tail}")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def state(self) -> dict[str, Any]:
        return self.ask()

    def turn(self, prompts: dict[Phase, Prompts]) -> dict[Phase, float]:
        """Seconds of every phase, per step in decode, after a short request that does not count."""
        self._note_idle()
        self.ask(prompts=prompts[PHASES[-1]], max_tokens=WARM)
        times = {}
        for phase, batch in prompts.items():
            seconds = self.ask(prompts=batch, max_tokens=1)
            if phase.name == "decode":
                longer = self.ask(prompts=batch, max_tokens=1 + phase.tokens)
                seconds = (longer - seconds) / phase.tokens
            times[phase] = seconds
        self._left = time.perf_counter(), self._cpu_seconds()
        return times

    def _cpu_seconds(self) -> float:
        own = psutil.Process(self.process.pid)
        used = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(times.user + times.system for times in used)

    def _note_idle(self) -> None:
        if self._left is not None:
            wall, cpu = self._left
            self.idle.append((self._cpu_seconds() - cpu) / (time.perf_counter() - wall))


@contextmanager
def running(name: str, shape: Shape, folder: Path, threads: int) -> Iterator[Engine]:
    """An engine, started and stopped; its checkpoint, caches and log are in ``folder``."""
    model, log = folder / "model", folder / "log"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(shape.config(name not in STOCK)))
    options = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": max(phase.batch for phase in PHASES),
    }
    if name not in STOCK:
        options["additional_config"] = {"attnres_algorithm": name}
    command = [sys.executable, "-m", "benchmarks.latency_engine", json.dumps(options)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(name, folder, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    engine = Engine(name, process, log)
    try:
        engine.start_s = engine.receive()
        yield engine
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def environment(name: str, folder: Path, threads: int) -> dict[str, str]:
    """The environment of an engine: no plugin for stock vLLM, equal threads, empty caches.

    vLLM binds threads and preloads OpenMP only in worker processes, so both are done here: without
    the preload torch and vLLM's kernels would each have a pool of threads.
    """
    torch = Path(find_spec("torch").origin).parent
    openmp = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    return os.environ | {
        "VLLM_PLUGINS": "" if name in STOCK else "attnres",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "GOMP_CPU_AFFINITY": " ".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "LD_PRELOAD": ":".join(map(str, openmp[:1])),
    }


def draw_prompts(shape: Shape, number: int) -> dict[Phase, Prompts]:
    """The prompts of round ``number``, new in every round and equal for all engines."""
    draw = random.Random(number)

    def prompts(phase: Phase) -> Prompts:
        tokens = range(3, shape.vocab)
        return [draw.choices(tokens, k=phase.prompt_tokens) for _ in range(phase.batch)]

    return {phase: prompts(phase) for phase in PHASES}


def check(engine: Engine, state: dict[str, Any], turns: int, before: dict[str, Any]) -> None:
    """Refuse to report an engine that ran something else than its name says.

    Args:
        engine: the engine.
        state: what it says of itself after its turns.
        turns: how many there were.
        before: what it said before them.

    Raises:
        RuntimeError: saying what differs.
    """
    expected: dict[str, Any] = {}
    if engine.name not in STOCK:
        expected = {
            name: {"eager": 0, "compiled": counts["compiled"]}
            for name, counts in before["executed"].items()
        }
        expected[engine.name]["compiled"] += turns * PASSES
    wrong = [
        f"{what}: {found}, expected {wanted}"
        for what, found, wanted in (
            ("plugin loaded", state["plugin_loaded"], engine.name not in STOCK),
            ("compilation", state["compilation"], "DYNAMO_TRACE_ONCE"),
            ("forward passes", state["executed"], expected),
        )
        if found != wanted
    ]
    if wrong:
        raise RuntimeError(f"the engine {engine.name} is not what it should be: {'; '.join(wrong)}")


def measure(
    shape: Shape, names: Sequence[str], rounds: int, threads: int, progress: tqdm
) -> tuple[dict[str, Any], Samples]:
    """Start the engines for a shape and ask them in turn.

    Returns:
        What each engine is, and the seconds by phase and engine, round after round.
    """
    samples: Samples = {(phase, name): [] for phase in PHASES for name in names}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []
        for name in names:
            progress.set_postfix_str(f"starting {name}")
            engines.append(stack.enter_context(running(name, shape, folder / name, threads)))
            progress.update()
        before = {engine.name: engine.state() for engine in engines}
        for number in range(rounds + DISCARDED):
            prompts = draw_prompts(shape, number)
            first = number % len(engines)
            for engine in engines[first:] + engines[:first]:
                progress.set_postfix_str(engine.name)
                times = engine.turn(prompts)
                if number >= DISCARDED:
                    for phase, seconds in times.items():
                        samples[phase, engine.name].append(seconds)
                progress.update()
        facts = {}
        for engine in engines:
            state = engine.state()
            check(engine, state, rounds + DISCARDED, before[engine.name])
            facts[engine.name] = {
                **state,
                "executed_at_start": before[engine.name]["executed"],
                "start_s": engine.start_s,
                "idle_cores": median(engine.idle),
            }
    return facts, samples


def summarise(shape: str, samples: Samples) -> list[dict[str, Any]]:
    """The rows of the document; a ratio is missing in those of the baseline."""
    rows = []
    for (phase, engine), seconds in samples.items():
        row = {"shape": shape, "phase": phase.name, "batch": phase.batch, "tokens": phase.tokens}
        row |= {"engine": engine, "median_s": median(seconds), "rounds": len(seconds)}
        if engine != BASELINE:
            ratios = paired_ratios(seconds, samples[phase, BASELINE])
            row |= {"ratio": median(ratios), "ci95": list(median_interval(ratios))}
            row |= {"ratio_min": min(ratios), "ratio_max": max(ratios)}
        rows.append(row | {"seconds": seconds})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a person."""
    head = f"{'shape':9}{'phase':9}{'batch':>5} {'engine':12}{'median':>11}   ratio  95 % interval"
    lines = [f"{head}     min to max"]
    for row in rows:
        line = f"{row['shape']:9}{row['phase']:9}{row['batch']:5} {row['engine']:12}"
        line += f"{1e3 * row['median_s']:8.2f} ms"
        if "ratio" in row:
            low, high = row["ci95"]
            line += f"{row['ratio']:8.3f}  {low:.3f} to {high:.3f}"
            line += f"  {row['ratio_min']:.3f} to {row['ratio_max']:.3f}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument(
        "--algorithms", choices=ENGINES[1:], nargs="+", default=ENGINES[1:], help="default: all"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--control", action="store_true", help="add a second baseline")
    parser.add_argument("--quick", action="store_true", help="tiny model, 3 rounds: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shape}
    rounds = 3 if options.quick else options.rounds

    engines, rows = {}, []
    names = (BASELINE, *options.algorithms, *((CONTROL,) if options.control else ()))
    turns = len(names) * (1 + rounds + DISCARDED)
    with tqdm(total=len(shapes) * turns, unit="turn", file=sys.stderr) as progress:
        for name, shape in shapes.items():
            engines[name], samples = measure(shape, names, rounds, options.threads, progress)
            rows += summarise(name, samples)
    sys.stderr.write(table(rows) + "\n")
    publish(
        "latency",
        arguments,
        options.out,
        quick=options.quick,
        config={
            "device": "cpu",
            "dtype": "bfloat16",
            "compiled": True,
            "prefix_caching": False,
            "weights": "dummy",
            "threads": options.threads,
            "rounds": rounds,
            "discarded_rounds": DISCARDED,
            "decode_prompt_tokens": 32,
        },
        shapes={name: asdict(shape) for name, shape in shapes.items()},
        engines=engines,
        results=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
