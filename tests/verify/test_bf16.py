"""What AttnRes loses in bfloat16, where the engine stores activations and nothing else.

The judge is the float64 model rounded where an engine stores (``rounded.py``).
"""

import math
from pathlib import Path
from statistics import fmean

import pytest
import torch
from checkpoints import write_house
from jobs import VOCABULARY, run_verify
from rounded import divergence, rounded_model

from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify import oracle

SEEDS = (0,)
SHAPE = {"layers": 6, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 192}

on_each_backend = pytest.mark.parametrize(
    "backend", ["cpp", pytest.param("torch", marks=pytest.mark.exhaustive)]
)


def choices(backend: str) -> list[dict[str, str]]:
    """Every algorithm on a backend."""
    return [{"attnres_algorithm": name, "attnres_backend": backend} for name in ALGORITHMS]


# The error of a site, in units of what the rounding of its result makes.  Scores, softmax and mix
# are float32, so nothing is added to it (measured: 1.000); with scores, folded queries or depth
# weights in bfloat16 it would be 1.05 to 1.6.  Only the answers of two-phase with cpp are rounded
# too, which adds as much at most, thus sqrt(2) (measured: 1.26 to 1.42).
LOSS = 1.01
LOSS_OF_ROUNDED_ANSWERS = 1.5
# The engine's distance over the judge's.  Measured 1.06 to 1.08 over all seeds and 1.00 to 1.15 for
# one, alike in every algorithm and backend: vLLM also rounds the rotation's table and attention's
# weights.
DISTANCE = 1.2


def job(served: Path, chosen: dict[str, str], prompts: list[list[int]]) -> dict:
    own = {"served": str(served), "reference": str(served), "prompts": prompts, "chosen": chosen}
    return own | {"dtype": "bfloat16"}


def uneven(folder: Path) -> tuple[list[Path], list[list[int]]]:
    """Checkpoints whose largest depth weight is 0.7 on average, by random queries, and prompts."""
    served = [write_house(folder / f"{s}", block_size=3, seed=s, **SHAPE) for s in SEEDS]
    generator = torch.Generator().manual_seed(5)
    return served, torch.randint(3, VOCABULARY, (3, 200), generator=generator).tolist()


def distance(kl: list[float]) -> float:
    """The mean square root of KL divergences.

    KL goes with the square of an error, and its mean hangs on a few tokens at which the function is
    most sensitive: over that of the judge it was between 0.7 and 1.5 from seed to seed.
    """
    return fmean(math.sqrt(max(0.0, one)) for one in kl)


def least_distance(served: list[Path], prompts: list[list[int]]) -> float:
    """The judge's distance from the float64 model, over all checkpoints."""
    models = [oracle.load(folder) for folder in served]
    judges = [rounded_model(model) for model in models]
    return sum(
        distance(divergence(model, prompts, map(judge.logprobs, prompts)))
        for model, judge in zip(models, judges, strict=True)
    )


@pytest.mark.engine
@on_each_backend
def test_uneven_depth_weights(backend, tmp_path):
    """Every site is as exact as its result's format, and the whole nearly as its activations'."""
    served, prompts = uneven(tmp_path)
    jobs = [job(folder, chosen, prompts) for chosen in choices(backend) for folder in served]
    results = run_verify(jobs, tmp_path / "run")
    least = least_distance(served, prompts)
    for number, chosen in enumerate(choices(backend)):
        own = results[number * len(served) : (number + 1) * len(served)]
        rounds = (chosen["attnres_algorithm"], chosen["attnres_backend"]) == ("two_phase", "cpp")
        bound = LOSS_OF_ROUNDED_ANSWERS if rounds else LOSS
        for result in own:
            assert max(result["losses"]) <= bound, (chosen, result["losses"])
        assert sum(distance(result["kl"]) for result in own) <= DISTANCE * least, chosen


@pytest.mark.engine
@pytest.mark.exhaustive
def test_uneven_depth_weights_compiled(tmp_path):
    """The same of a compiled engine, whose sites cannot be listened to."""
    served, prompts = uneven(tmp_path)
    chosen = {"attnres_algorithm": "two_phase", "attnres_backend": "cpp"}
    asked = {"compiled": [str(folder) for folder in served], "prompts": prompts, "chosen": chosen}
    (kl,) = run_verify([asked | {"dtype": "bfloat16"}], tmp_path / "run")
    least = least_distance(served, prompts)
    assert sum(map(distance, kl)) <= DISTANCE * least
