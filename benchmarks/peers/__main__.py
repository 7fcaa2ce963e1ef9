"""Attention Residuals on a CPU by Hugging Face's ``generate``, and by attnres-serve.

    python -m benchmarks.peers --out benchmarks/results/cpu-peers.json
    python -m benchmarks.peers --quick                does it work: tiny, eager, float32

All answer the same prompts with all cores, greedily, ignoring EOS:

* ``hf_*``: transformers' cached ``generate`` on an AttnRes class in the style of open-attnres or of
  FLA (benchmarks/peers/models.py), eager, or decode steps compiled with a static cache
* ``vllm``: the same Llama with standard residuals in vLLM, the plugin not loaded
* ``single_pass_*``, ``two_phase_*``: attnres-serve with the cpp and with the torch backend

Workloads: a single request (prompt 128, 32 output tokens), a batch of eight of those, and a stream
of 24 requests of mixed lengths, all there at the beginning; eight at most are computed together.
``generate`` knows no stream: as its users do, it is called for batches of eight in order of
arrival, padded to the longest prompt, each until its longest answer is done.  Only tokens that
were asked for count.

First the gate: tiny models in float32, where all but ``vllm``, whose function is
another, must give the same tokens.  Then bf16, in turn, every round in another order and with
fresh prompts of the same lengths.  A ratio is seconds over a reference's, within a round.  Every
peer is started once, so the intervals do not know the luck of a process, which is some percent;
``serving.latency`` tells so small a difference.  The last line on stdout is one JSON document;
the table goes to stderr.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from attnres_serve.bench.machine import cores
from attnres_serve.bench.measure import check_ran, order
from attnres_serve.bench.process import Contender, Engine, running
from attnres_serve.bench.ratios import paired_ratios
from benchmarks.common import median_interval, publish
from benchmarks.peers.models import STYLES, write_checkpoints
from benchmarks.peers.process import CONCURRENT, Requests
from benchmarks.published import tables

HF, VLLM = REFERENCES = ("hf_open_attnres", "vllm")
SCRIPT = Path(__file__).with_name("process.py")
LENGTH = 512  # tokens of a request, at most
DISCARDED = 2  # rounds before those that count; transformers compiles in them


@dataclass(frozen=True)
class Peer:
    """transformers in a style of ``models``, our plugin, or with neither set plain vLLM."""

    name: str
    compiled: bool
    style: str | None = None
    algorithm: str | None = None
    backend: str | None = None

    def contender(self, folder: Path, dtype: str) -> Contender:
        """How to start it with its checkpoint in ``folder``."""
        model = str(folder / ("attnres" if self.style or self.algorithm else "standard"))
        if self.style:
            compiled = ["compiled"] if self.compiled else []
            return Contender(self.name, ["hf", model, dtype, self.style, *compiled], script=SCRIPT)
        ours = {"attnres_algorithm": self.algorithm, "attnres_backend": self.backend}
        options = {
            "model": model,
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": not self.compiled,
            "enable_prefix_caching": False,
            "max_model_len": LENGTH,
            "max_num_seqs": CONCURRENT,
            "max_num_batched_tokens": CONCURRENT * LENGTH,
            "additional_config": ours if self.algorithm else {},
        }
        flags, has_plugin = ["vllm", json.dumps(options)], self.algorithm is not None
        return Contender(self.name, flags, self.algorithm, has_plugin, SCRIPT)


PEERS = (
    *(Peer(f"hf_{style}", False, style) for style in STYLES),
    *(Peer(f"hf_{style}_compiled", True, style) for style in STYLES),
    Peer(VLLM, True),
    *(
        Peer(f"{algorithm}_{backend}", True, algorithm=algorithm, backend=backend)
        for backend in ("cpp", "torch")
        for algorithm in ("single_pass", "two_phase")
    ),
)
EAGER = tuple(replace(one, compiled=False) for one in PEERS if not (one.style and one.compiled))


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, block: int
) -> dict[str, Any]:
    """Keys of config.json; ``block`` is the block size in sublayers, 1 is Full AttnRes."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "attn_res": {"block_size": block},
    }


SHAPES = {
    "768x12": llama(768, 12, 12, 12, 2048, 32000, block=3),
    "512x8-full": llama(512, 8, 8, 8, 1536, 32000, block=1),
}
TINY = {
    "128x4": llama(128, 4, 2, 1, 256, 512, block=2),
    "128x3-full": llama(128, 3, 2, 1, 256, 512, block=1),
}


@dataclass(frozen=True)
class Workload:
    """``lengths`` are the tokens of the prompt and of the answer, of every request."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    def requests(self, vocab: int, number: int) -> Requests:
        """The requests of round ``number``, equal for all peers."""
        draw = random.Random(f"{self.name} {number}")
        return [(draw.choices(range(3, vocab), k=size), wanted) for size, wanted in self.lengths]


def workloads(
    prompt: int, answer: int, stream: int, prompts: tuple[int, int], answers: tuple[int, int]
) -> tuple[Workload, ...]:
    """The workloads, the longest first because transformers never shortens a static cache."""
    draw = random.Random(0)
    mixed = tuple((draw.randint(*prompts), draw.randint(*answers)) for _ in range(stream))
    one = ((prompt, answer),)
    return Workload("stream", mixed), Workload("batch", 8 * one), Workload("single", one)


WORKLOADS = workloads(128, 32, 24, (16, 256), (8, 64))
TINY_WORKLOADS = workloads(16, 8, 16, (1, 24), (2, 12))
Samples = dict[tuple[Workload, str], list[float]]


def agree(tokens: dict[str, Any]) -> None:
    """Raise RuntimeError for peers whose tokens are not those of transformers, eager."""
    wrong = [name for name, found in tokens.items() if name != VLLM and found != tokens[HF]]
    if wrong:
        raise RuntimeError(f"other tokens than {HF} in float32: {', '.join(wrong)}")


def check(peer: Peer, engine: Engine, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Refuse what ran something else than its name says, or compiled while rounds counted.

    Args:
        peer: what it should be.
        engine: its process.
        before, after: what it said of itself around the rounds that count.

    Raises:
        RuntimeError: with both; SettingError: by ``check_ran``.
    """
    check_ran(engine, after)
    wanted = {"compiled": peer.compiled, "backend": peer.backend, "graphs": before["graphs"]}
    if not wanted.items() <= after.items():
        raise RuntimeError(f"{peer.name} is not what it should be: {before}, then {after}")


def check_lengths(name: str, requests: Requests, answers: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError if an answer has not as many tokens as were asked for."""
    if [len(answer) for answer in answers] != [wanted for _, wanted in requests]:
        raise RuntimeError(f"{name} did not give as many tokens as it was asked for")


def measure(
    shape: dict[str, Any],
    dtype: str,
    peers: Sequence[Peer],
    works: Sequence[Workload],
    rounds: int,
    progress: tqdm,
) -> tuple[dict[str, Any], Samples]:
    """Start the peers and ask them in turn; in float32 their tokens must agree.

    Returns:
        What each of them is, and the seconds by workload and name, round after round.
    """
    samples: Samples = {(work, peer.name): [] for work in works for peer in peers}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoints(folder, shape)
        engines = []
        for peer in peers:
            progress.set_postfix_str(f"starting {peer.name}")
            started = running(peer.contender(folder, dtype), folder)
            engines.append(stack.enter_context(started))
            engines[-1].wait()
            progress.update()
        before = []
        for number in range(DISCARDED + rounds):
            if number == DISCARDED:
                before = [engine.ask("facts") for engine in engines]
            tokens: dict[str, Any] = {}
            for engine in order(engines, number):
                progress.set_postfix_str(engine.name)
                for work in works:
                    requests = work.requests(shape["vocab_size"], number)
                    answer = engine.ask("generate", requests=requests)
                    check_lengths(engine.name, requests, answer["tokens"])
                    tokens.setdefault(engine.name, []).append(answer["tokens"])
                    if number >= DISCARDED:
                        samples[work, engine.name].append(answer["seconds"])
                progress.update()
            if dtype == "float32":
                agree(tokens)
        after = [engine.ask("facts") for engine in engines]
        for what in zip(peers, engines, before, after, strict=True):
            check(*what)
    return {engine.name: facts for engine, facts in zip(engines, after, strict=True)}, samples


def summarise(shape: str, samples: Samples) -> list[dict[str, Any]]:
    """The rows of the document, with the ratios to both references."""
    rows = []
    for (work, name), seconds in samples.items():
        row: dict[str, Any] = {"shape": shape, "workload": work.name, "peer": name}
        outputs = sum(wanted for _, wanted in work.lengths)
        row |= {"median_s": median(seconds), "tokens_per_s": outputs / median(seconds)}
        for reference in REFERENCES:
            ratios = paired_ratios(seconds, samples[work, reference])
            interval = list(median_interval(ratios))
            row[f"over_{reference}"] = {"ratio": median(ratios), "ci95": interval}
        rows.append(row | {"seconds": seconds})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="the first gate, timed: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    peers = EAGER if options.quick else PEERS
    rounds = 3 if options.quick else options.rounds
    gate = [(name, TINY[name], "float32", TINY_WORKLOADS, 3) for name in TINY]
    real = [(name, SHAPES[name], "bfloat16", WORKLOADS, rounds) for name in options.shape]
    stages, reported = (gate[:1], gate[:1]) if options.quick else (gate + real, real)

    facts, rows = {}, []
    turns = len(peers) * sum(1 + DISCARDED + stage[-1] for stage in stages)
    with tqdm(total=turns, unit="turn", file=sys.stderr) as progress:
        for stage in stages:
            name, shape, dtype, works, number = stage
            found, samples = measure(shape, dtype, peers, works, number, progress)
            if stage in reported:
                facts[name] = found
                rows += summarise(name, samples)
    sys.stderr.write("\n".join(tables.peers(rows)) + "\n")
    publish(
        "peers",
        arguments,
        options.out,
        quick=options.quick,
        config={
            "device": "cpu",
            "dtype": reported[0][2],
            "concurrent": CONCURRENT,
            "threads": cores(),
            "transformers": version("transformers"),
            "rounds": rounds,
            "discarded_rounds": DISCARDED,
            "workloads": {work.name: work.lengths for work in reported[0][3]},
        },
        shapes={name: shape for name, shape, *_ in reported},
        peers=facts,
        results=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
