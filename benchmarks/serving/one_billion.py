"""A model of a billion parameters as Kimi K3's, served on a CPU: start, memory and speed.

    python -m benchmarks.serving.one_billion --out benchmarks/results/cpu-one-billion.json
    python -m benchmarks.serving.one_billion --write FOLDER        the model alone, to be served

13 layers, 9 of Kimi Delta Attention and 4 of latent attention with output gates; 64 experts on a
latent of 512, of which a token sees 4, and 2 shared ones; blocks of four layers; random weights in
bfloat16.  It is served as ``attnres-serve serve`` does, first with no compiled code and then with
that of the first start: seconds until the server is there, the highest resident memory of all its
processes together, and tokens a second of a prompt and of an answer.  Then it is compared with the
same model with standard residuals, as ``benchmarks.serving.latency`` does.

The last line on stdout is one JSON document; the tables go to stderr.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import torch

from attnres_serve.bench import machine
from attnres_serve.bench.measure import PROCEDURE
from attnres_serve.bench.workload import Case, draw_prompts
from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.checked import check_model
from attnres_serve.checkpoints.files import Header
from attnres_serve.checkpoints.names import expected_parts, tensor_name
from attnres_serve.checkpoints.write import SafetensorsFile
from benchmarks.common import Length, add_length, length_of, publish
from benchmarks.published import tables
from benchmarks.serving import latency
from benchmarks.serving.load import NAME, OURS, TOKENIZER, serving
from benchmarks.serving.models import flags
from benchmarks.serving.shapes import LONGEST, Shape

FULL = [4, 8, 12, 13]
SHAPE = Shape(
    "kimi_linear",
    layers=13,
    block_size=8,
    sizes={
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 1024,
        "intermediate_size": 4864,
        "kv_lora_rank": 64,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": FULL,
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 14) if layer not in FULL],
            "num_heads": 12,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": 448,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 12,
        "num_expert_group": 1,
        "num_experts": 64,
        "num_experts_per_token": 4,
        "num_key_value_heads": 12,
        "num_shared_experts": 2,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_expert_hidden_size": 512,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
)
QUICK = replace(
    SHAPE,
    sizes=SHAPE.sizes
    | {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    | {"num_experts": 8, "routed_expert_hidden_size": 64, "vocab_size": 2048},
)
STARTS = 2  # of the server: one that compiles, one that does not


def write(shape: Shape, folder: Path) -> int:
    """Write a model with random weights and a tokenizer into a new folder.

    Returns:
        The number of its parameters.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    for file in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    parsed = check_model(str(folder), has_weights=False).translated(str(folder))
    base, hidden = BaseTensors(parsed.family, parsed.config), parsed.config["hidden_size"]
    shapes = dict(base.needed)
    for site, part in expected_parts(parsed.spec):
        name = tensor_name(site, part, base.layout)
        shapes[name] = {"proj": (1, hidden), "norm": (hidden,), "bias": ()}[part]
    path = folder / "model.safetensors"
    headers = {name: Header(size, "BF16", path) for name, size in shapes.items()}
    torch.manual_seed(0)
    with SafetensorsFile(path, headers) as weights:
        for name, size in shapes.items():
            tensor = torch.ones(size, dtype=torch.bfloat16)
            if len(size) > 1:
                tensor.normal_(0, size[-1] ** -0.5)
            weights.write(name, tensor, lambda _: None)
    return sum(map(prod, shapes.values()))


def ask(url: str, prompt: list[int], tokens: int) -> float:
    """Seconds of a request; the end of a sequence is ignored."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    begin = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=None)
    took = time.perf_counter() - begin
    assert answer.raise_for_status().json()["usage"]["completion_tokens"] == tokens
    return took


def most_memory() -> float:
    """Sum of the peak resident memory of this process's descendants, in GiB."""
    kib = 0
    for process in psutil.Process().children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib += int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
    return kib / 2**20


def serve(model: "Model", folder: Path, vocabulary: int, scratch: Path) -> list[dict[str, float]]:
    """Measurements of every start of a server."""
    times = model.times
    os.environ["VLLM_CACHE_ROOT"] = str(scratch / "cache")  # without what was compiled before
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # the server takes what the model needs
    rows = []
    for number in range(STARTS):
        begin = time.perf_counter()
        with serving(OURS, folder, model.flags[1:]) as url:  # the first has no weights read
            start_s = time.perf_counter() - begin
            short, long = [], []
            for turn in range(times):
                case = Case("prefill", 1, model.prompt, 0)
                (prompt,) = draw_prompts(vocabulary, case, number * times + turn)
                short.append(ask(url, prompt, 1))
                long.append(ask(url, prompt[::-1], 1 + model.answer))
            memory = most_memory()
        prompt_s = sorted(short)[times // 2]
        rows.append(
            {
                "start_s": start_s,
                "memory_gib": memory,
                "prompt_tokens_per_s": model.prompt / prompt_s,
                "answer_tokens_per_s": model.answer / (sorted(long)[times // 2] - prompt_s),
            }
        )
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    model = Model("serving.one_billion", "mini_k3-1024x13", SHAPE, QUICK, __doc__)
    return run(model, sys.argv[1:] if arguments is None else arguments)


class Model(NamedTuple):
    """A model to be served at full size.

    Attributes:
        benchmark: what the document is called.
        name: the model's, in the document.
        shape, quick: the full shape, and a tiny one of the same kind.
        about: what is measured; the first line describes the command.
        times: requests of each kind of a start, of which the median counts.
        prompt, answer: tokens of a request.
        step: the most tokens that an engine computes together, as it does once while it starts.
        cases: see ``latency``.
    """

    benchmark: str
    name: str
    shape: Shape
    quick: Shape
    about: str
    times: int = 5
    prompt: int = 512
    answer: int = 64
    step: int = LONGEST
    cases: Sequence[Case] = latency.CASES

    @property
    def flags(self) -> tuple[str, ...]:
        """Of engines; the first has no weights read."""
        return flags(self.step)


def run(model: Model, arguments: list[str]) -> int:
    """Measure a model as a command line asks for it, and print one JSON document."""
    parser = argparse.ArgumentParser(description=model.about.partition("\n")[0])
    add_length(parser, 2)
    parser.add_argument("--quick", action="store_true", help="a tiny model: no evidence")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the model, no more")
    parser.add_argument("--budget", type=float, default=inf, metavar="MINUTES", help="of latency")
    parser.add_argument("--out", type=Path, help="also write the document there")
    options = parser.parse_args(arguments)
    shape = model.quick if options.quick else model.shape
    if options.write:
        write(shape, options.write)
        return 0
    length = length_of(parser, options, 2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        parameters = write(shape, folder)
        served = serve(model, folder, shape.sizes["vocab_size"], Path(scratch))
        shutil.rmtree(folder)
        budget = 60 * options.budget
        compared = latency.measure(
            shape, ["single_pass"], False, length, budget, model.cases, model.flags
        )
    result = {"parameters": parameters, "served": served, **compared}
    sys.stderr.write("\n".join(tables.one_billion(result)) + "\n")
    publish(
        model.benchmark,
        arguments,
        options.out,
        quick=options.quick,
        config={
            "flags": list(model.flags),
            "threads": machine.cores(),
            "prompt": model.prompt,
            "answer": model.answer,
            "steps": model.cases[-1].steps,
            "requests": model.times,
            **Length(compared["starts"], compared["rounds"]["counted"]).content(),
            "procedure": PROCEDURE,
        },
        results={model.name: result},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
