"""Seconds of replacing the weights of a served model of Qwen3-0.6B's shape, beside a new start.

    python -m benchmarks.serving.updates --out benchmarks/results/cpu-updates.json
    python -m benchmarks.serving.updates --quick          a tiny model: no evidence

Random weights in bfloat16 with blocks of 8 sublayers, served on a CPU with
``--enable-weight-updates``.  An update is one ``WeightSender.send`` of all tensors with no request
running: it pauses, writes and reads them, checks them, replaces them and resumes.  A restart is the
start of a server with compiled code at hand, until it is ready.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from attnres_serve import WeightSender
from benchmarks.common import publish, spread
from benchmarks.serving import one_billion
from benchmarks.serving.load import OURS, serving
from benchmarks.serving.models import flags
from benchmarks.serving.shapes import Shape

SIZES = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
SHAPE = Shape("qwen3", layers=28, block_size=8, sizes=SIZES)
TINY = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
QUICK = Shape("qwen3", layers=4, block_size=4, sizes=SIZES | TINY)
FLAGS = flags(step=256)[1:]  # the first has no weights read
STARTS, UPDATES = 3, 3  # the first start compiles and does not count; updates of each


def main() -> int:
    """Measure, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model: no evidence")
    parser.add_argument("--out", type=Path, help="also write the document there")
    options = parser.parse_args()
    os.environ["VLLM_API_KEY"] = os.environ["OPENAI_API_KEY"] = secrets.token_urlsafe()
    starts, updates = [], []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VLLM_CACHE_ROOT"] = str(Path(scratch) / "cache")
        folder = Path(scratch) / "model"
        parameters = one_billion.write(QUICK if options.quick else SHAPE, folder)
        tensors = load_file(folder / "model.safetensors")
        for _ in range(STARTS):
            begin = time.perf_counter()
            with serving(OURS, folder, [*FLAGS, "--enable-weight-updates"]) as url:
                starts.append(time.perf_counter() - begin)
                for number in range(UPDATES):
                    begin = time.perf_counter()
                    WeightSender(url).send(tensors.items(), version=str(number))
                    updates.append(time.perf_counter() - begin)
                sys.stderr.write(f"start {starts[-1]:.1f} s, updates {updates[-UPDATES:]} s\n")
    publish(
        "serving.updates",
        sys.argv[1:],
        options.out,
        quick=options.quick,
        config={"flags": list(FLAGS), "starts": STARTS, "updates": UPDATES},
        results={
            "qwen3-1024x28": {
                "parameters": parameters,
                "restart_s": spread(starts[1:]),
                "update_s": spread(updates),
            }
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
