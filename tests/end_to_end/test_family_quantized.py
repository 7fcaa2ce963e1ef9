"""INT8 of compressed-tensors on every family that takes it, without experts, routers and what is
folded.

The judge is Hugging Face's class in float64 with the mixes, with the weights that the INT8 ones
stand for. What is left are the activations, which vLLM rounds to INT8 by tokens, and bfloat16.
The bound is one of the median: where two experts are nearly as good, or sources cancel, a token of
a random model is answered otherwise, and those behind it in its prompt may be.  So prompts are
many.  Activations are off by 0.8 % (``test_features.py``), and those of bfloat16 by less: that is
2 % a sublayer, 6 % through eight, 0.2 of logits with a spread of three, and half the square of it
is 0.02.  One and a half times the error is allowed; where the scale of one projection is doubled,
the median is 0.2 to 0.6.
"""

import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from adapters import UNTAKEN, WEIGHTS, copy_with, linear_layers
from checkpoints import computes_int8, quantised, write_house
from checkpoints.hugging_face import tiny
from checkpoints.quantized import dequantised
from facts import FACTS
from jobs import fresh_prompts, run_verify, verify_job
from safetensors.torch import load_file

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from tests.end_to_end.test_families import JUDGED, chosen

pytestmark = [pytest.mark.engine, pytest.mark.families]


def takes_int8(name: str) -> bool:
    config = tiny(name) | {"quantization_config": {"quant_method": "compressed-tensors"}}
    try:
        FAMILIES[name].check(config)
    except CheckpointError:  # ``tests/families`` shows that the rest of it is right
        return False
    return True


TAKES = [name for name in JUDGED if not FACTS[name].is_tiny or takes_int8(name)]
EXPERTS = "re:.*[.]experts([.].*)?$"
BOUND = 0.05  # of a KL divergence, in nats


def ask(root: Path, name: str) -> dict[str, Any]:
    changes = next(iter(FACTS[name].variants.values()))
    seed = random.randrange(10**6)
    base = write_house(root / name, name, layers=4, block_size=3, seed=seed, changes=changes)
    tensors = load_file(base / WEIGHTS)
    layers = linear_layers(tensors, UNTAKEN)
    rest = {stem for key in tensors if (stem := key.removesuffix(".weight")) not in layers}
    served = quantised(root / f"{name}-int8", base, [EXPERTS, *sorted(rest)], layers)
    meant = copy_with(root / f"{name}-meant", base, dequantised(load_file(served / WEIGHTS)))
    job = verify_job(served, meant, fresh_prompts((40, *[9] * 8)))
    return job | {"dtype": "bfloat16", "judge": "family"}


@pytest.fixture(scope="module")
def divergences(request, tmp_path_factory) -> dict[str, list[float]]:
    random.seed()
    root = tmp_path_factory.mktemp("int8")
    jobs = {name: ask(root, name) for name in chosen(request, "name")}
    results = run_verify([*jobs.values()], root / "run")
    return dict(zip(jobs, results, strict=True))


@computes_int8
@pytest.mark.parametrize("name", TAKES)
def test_int8_answers_as_what_it_stands_for(divergences, name, record_property):
    assert median(divergences[name]) < BOUND, divergences[name]
    record_property("shows", (name, "INT8"))
