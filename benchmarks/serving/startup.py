"""Seconds from ``make serve`` to the first token, with the environment made.

    python -m benchmarks.serving.startup --out benchmarks/results/cpu-startup.json
    python -m benchmarks.serving.startup --model path/to/checkpoint --runs 3

A run starts ``make serve``, eager, on a free port and asks for one token until it gets it; the time
is that of the whole, from starting ``make`` to having the answer.  The last line on stdout is one
JSON document.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.request import Request, urlopen

from tqdm import tqdm

from benchmarks.common import ROOT, publish, spread

DEMO = "examples/demo/checkpoint"
NAME = "demo"
PAUSE = 0.05  # seconds between two attempts, which the result may be too long by
LIMIT = 300  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: str, port: int, log: IO[str]) -> Iterator[subprocess.Popen]:
    """``make serve`` in a process group of its own, which is ended afterwards."""
    flags = f"--enforce-eager --served-model-name {NAME} --port {port}"
    process = subprocess.Popen(
        ["make", "serve", f"MODEL={model}", f"ARGS={flags}"],
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(60)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break


def first_token(port: int) -> bool:
    """Ask for one token; False while nothing answers."""
    body = {"model": NAME, "prompt": [3], "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urlopen(request, timeout=60) as response:
            return json.load(response)["usage"]["completion_tokens"] == 1
    except OSError:  # nothing listens yet, or it is not ready
        return False


def seconds_to_first_token(model: str) -> float:
    """One run.

    Raises:
        RuntimeError: the server ended or gave no token in time; with the end of its log.
    """
    with tempfile.TemporaryFile("w+") as log:
        port = free_port()
        begin = time.perf_counter()
        with serving(model, port, log) as process:
            while not first_token(port):
                if process.poll() is not None or time.perf_counter() - begin > LIMIT:
                    log.seek(0)
                    raise RuntimeError("no token from make serve:\n" + log.read()[-4000:])
                time.sleep(PAUSE)
            return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEMO, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    if not Path(ROOT, options.model, "config.json").is_file():
        parser.error(f"{options.model} is not a checkpoint folder")

    runs = [seconds_to_first_token(options.model) for _ in tqdm(range(options.runs), unit="run")]
    result = spread(runs)
    sys.stderr.write(" ".join(f"{name} {value:.1f} s" for name, value in result.items()) + "\n")
    model = DEMO if options.model == DEMO else Path(options.model).name
    publish(
        "startup",
        arguments,
        options.out,
        config={"model": model, "device": "cpu", "compiled": False, "runs": options.runs},
        results=[{**result, "seconds": runs}],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
