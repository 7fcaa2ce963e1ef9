"""The load of ``vllm bench serve`` on this server and on stock vLLM.

    python -m benchmarks.serving.load --out benchmarks/results/cpu-load.json
    python -m benchmarks.serving.load --quick             does it work: tiny model, one start, eager

``attnres-serve serve`` of a model with dummy weights, and vLLM's server of the same model with
standard residuals, without the plugin; both as a user starts them, without prefix caching.  Both
run together and take turns, at 1, 8 and 32 requests at a time, with the same prompts, which are new
in every round; the order alternates between rounds.  The first round of a start does not count.
Figures are those of vLLM's client: requests a second, and TTFT and ITL as their median and 99th
percentile.  A ratio is ours to stock vLLM's in one round; the interval is over starts, or over the
rounds of a single one.

The last line on stdout is one JSON document; the table goes to stderr.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from attnres_serve.bench.over_http import run_client
from attnres_serve.bench.ratios import paired_ratios, ratio_summary
from attnres_serve.errors import SettingError
from attnres_serve.start import child, engine_log
from benchmarks.common import EIGHT, ROOT, Length, add_length, length_of, publish
from benchmarks.published import tables
from benchmarks.published.tables import FIGURES
from benchmarks.serving.models import FLAGS, models
from benchmarks.serving.shapes import LLAMAS, QUICK, Shape

BASELINE, OURS = "vllm", "attnres_serve"
NAME = "load"  # that both serve the model by
AT_A_TIME = (1, 8, 32)
PROMPT, ANSWER = 128, 32  # tokens
REQUESTS = {1: 16, 8: 64, 32: 128}  # of a round
TOKENIZER = ROOT / "examples" / "demo" / "checkpoint"  # of 2048 tokens, which every shape has
COMMANDS = {
    BASELINE: ("vllm.entrypoints.openai.api_server", "--model"),
    OURS: ("attnres_serve", "serve"),
}

Round = dict[str, dict[int, dict[str, float]]]  # by server and requests at a time


@contextmanager
def serving(name: str, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """The address of a server, which is stopped afterwards.

    Raises:
        SettingError: it does not start.
    """
    module, *command = COMMANDS[name]
    port = child.free_port()
    address = (f"--host={child.HOST}", f"--port={port}", f"--served-model-name={NAME}")
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    if name == BASELINE:  # which takes nearly all memory unless a limit is set
        env = {"VLLM_CPU_KVCACHE_SPACE": "1"} | env | {"VLLM_PLUGINS": ""}
    with (
        closing(engine_log.EngineLog(f"load-{name}")) as log,
        child.running(
            [sys.executable, "-m", module, *command, str(folder), *address, *flags],
            env=env | log.variables,
            stdin=subprocess.DEVNULL,
            stdout=log.file,
            stderr=log.file,
            start_new_session=True,  # as in a separate terminal: Linux shares cores by session
        ) as process,
    ):
        if not child.serves(process, port):
            raise SettingError(
                f"the server of {name} did not start: {log.why(process.returncode)}."
            )
        yield f"http://{child.HOST}:{port}"


def load(url: str, at_a_time: int, seed: int) -> dict[str, float]:
    """The figures that vLLM's client measures.

    Raises:
        SettingError: a request failed.
    """
    workload = {
        "max-concurrency": at_a_time,
        "num-prompts": REQUESTS[at_a_time],
        "random-input-len": PROMPT,
        "random-output-len": ANSWER,
        "seed": seed,
    }
    flags = [f"--base-url={url}", f"--model={NAME}", f"--tokenizer={TOKENIZER}", "--disable-tqdm"]
    with redirect_stdout(sys.stderr):
        figures = run_client(workload, flags)
    return {figure: figures[figure] for figure in FIGURES}


def start(shape: Shape, rounds: int, flags: Sequence[str], first: int) -> list[Round]:
    """The rounds of one start of both servers; ``first`` is the seed of its first round."""
    results = []
    with ExitStack() as stack:
        folder, baseline, _ = stack.enter_context(models(shape))
        urls = {}
        for name, model in ((BASELINE, baseline), (OURS, folder)):
            for file in TOKENIZER.glob("tokenizer*.json"):
                shutil.copy(file, model)
            urls[name] = stack.enter_context(serving(name, model, flags))
        for number in range(rounds + 1):
            order = [*urls] if (first + number) % 2 else [*reversed(urls)]
            one: Round = {name: {} for name in urls}
            for at_a_time in AT_A_TIME:
                for name in order:
                    one[name][at_a_time] = load(urls[name], at_a_time, first + number)
            results.append(one)
    return results[1:]


def compare(starts: Sequence[Sequence[Round]]) -> list[dict[str, Any]]:
    """A row for each load and figure: the ratio, and both servers' values in every round."""
    rows = []
    for at_a_time in AT_A_TIME:
        for figure in FIGURES:
            both = [
                [[one[name][at_a_time][figure] for one in rounds] for name in (OURS, BASELINE)]
                for rounds in starts
            ]
            ratios = [paired_ratios(*one) for one in both]
            if len(ratios) == 1:  # the interval is over its rounds
                ratios = [[ratio] for ratio in ratios[0]]
            ours, theirs = ([one[which] for one in both] for which in (0, 1))
            row = {"at_a_time": at_a_time, "figure": figure, **ratio_summary(ratios)}
            rows.append(row | {OURS: ours, BASELINE: theirs})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=LLAMAS, default="768x12")
    add_length(parser, EIGHT)
    parser.add_argument("--quick", action="store_true", help="tiny, eager, one start: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    length = length_of(parser, options, EIGHT)
    flags = [*FLAGS, f"--max-num-seqs={max(AT_A_TIME)}", "--no-enable-prefix-caching"]
    name, shape = options.shape, LLAMAS[options.shape]
    if options.quick:
        name, length, flags = "128x4", Length(1, 2), [*flags, "--enforce-eager"]
        shape = QUICK[name]
    starts = [
        start(shape, length.rounds, flags, (length.rounds + 1) * number)
        for number in range(length.starts)
    ]
    rows = compare(starts)
    sys.stderr.write("\n".join(tables.load(rows)) + "\n")
    config = {"shape": name, "prompt": PROMPT, "answer": ANSWER, "flags": flags, **length.content()}
    config["interval"] = config["interval"] or "over rounds"
    publish(
        "serving.load", arguments, options.out, quick=options.quick, config=config, results=rows
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
