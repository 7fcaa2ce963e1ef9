"""Latency of every algorithm against standard residuals, on models of stated shapes.

    python -m benchmarks.latency --out benchmarks/results/cpu-latency.json
    python -m benchmarks.latency --shape 768x12 --starts 10 --control
    python -m benchmarks.latency --quick              does it work: tiny model, one start

What ``attnres-serve bench`` measures, for checkpoints that need no files: Llamas with eight blocks
and dummy weights in bfloat16, one engine for each algorithm beside the baseline, all in the same
rounds, for as many starts as there.  ``--control`` adds a second baseline, whose ratio should be 1.

The last line on stdout is one JSON document; the table goes to stderr.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnres_serve.bench import machine, report, session
from attnres_serve.bench.baseline import read, write_twin
from attnres_serve.bench.command import BASELINE, CONTROL
from attnres_serve.bench.length import TRIAL, Length, add_length
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.overhead import overheads
from attnres_serve.bench.process import attnres, stock
from attnres_serve.bench.workload import BATCHES, STEPS, make_cells
from attnres_serve.formats.translation import Translation
from attnres_serve.settings import ALGORITHM_KEY, ALGORITHMS
from benchmarks.common import EIGHT, asked_length, publish

LONGEST = 1024
FLAGS = (
    "--load-format=dummy",
    "--dtype=bfloat16",
    f"--max-model-len={LONGEST}",
    f"--max-num-batched-tokens={LONGEST}",
    "--max-num-seqs=8",
)


@dataclass(frozen=True)
class Shape:
    """A Llama; ``block_size`` in sublayers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    block_size: int
    vocab: int = 32000

    def config(self) -> dict[str, Any]:
        """The content of config.json in the house format."""
        return {
            "architectures": ["AttnResLlamaForCausalLM"],
            "model_type": "attnres_llama",
            "attn_res": {"block_size": self.block_size},
            "attention_bias": False,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": LONGEST,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }


SHAPES = {
    "768x12": Shape(768, 12, heads=12, kv_heads=12, intermediate=2048, block_size=3),
    "1024x28": Shape(1024, 28, heads=16, kv_heads=8, intermediate=3072, block_size=7),
}
QUICK = {"128x4": Shape(128, 4, heads=2, kv_heads=1, intermediate=256, block_size=1, vocab=512)}


@contextmanager
def models(shape: Shape) -> Iterator[tuple[Path, Path, Translation]]:
    """Folders of a model and of its standard-residual twin, and what the model's config means."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, twin = Path(scratch) / "model", Path(scratch) / "twin"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape.config()))
        source = read(str(folder), has_weights=False)
        write_twin(source, twin)
        yield folder, twin, source.translation


def measure(
    shape: Shape, algorithms: list[str], control: bool, length: Length, threads: int, steps: int
) -> dict[str, Any]:
    """What was found for one shape: engines, cells, overheads by algorithm and phase."""
    with models(shape) as (folder, twin, translation):
        contenders = [stock(BASELINE, twin, FLAGS)]
        contenders += [attnres(name, folder, FLAGS, {ALGORITHM_KEY: name}) for name in algorithms]
        if control:
            contenders.append(stock(CONTROL, twin, FLAGS))
        cells = make_cells(LONGEST, None, BATCHES, None, steps)
        found = session.run(contenders, cells, length, threads, translation)
    overhead = {
        contender.name: overheads(found.results, contender.name, BASELINE)
        for contender in contenders[1:]
    }
    return {"shape": asdict(shape), **report.content(found, BASELINE), "overhead": overhead}


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--algorithms", choices=ALGORITHMS, nargs="+", default=list(ALGORITHMS))
    add_length(parser, EIGHT)
    parser.add_argument("--steps", type=int, default=STEPS, help="of decode")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="default: all cores")
    parser.add_argument("--control", action="store_true", help="add a second baseline")
    parser.add_argument("--quick", action="store_true", help="tiny model, one start: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    shapes = QUICK if options.quick else {name: SHAPES[name] for name in options.shape}
    length = asked_length(parser, options, TRIAL if options.quick else EIGHT)
    asked = options.algorithms, options.control, length, options.threads, options.steps
    results = {}
    for name, shape in shapes.items():
        results[name] = measure(shape, *asked)
        sys.stderr.write(f"{name}\n{report.tables(results[name])}\n\n")
    publish(
        "latency",
        arguments,
        options.out,
        quick=options.quick,
        config={
            "compiled": True,
            "flags": list(FLAGS),
            "threads": options.threads,
            **length.told(length.starts),
            "steps": options.steps,
            "procedure": PROCEDURE,
        },
        results=results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
