"""What AttnRes loses in bfloat16, where the engine stores activations and nothing else.

Processors differ in what vLLM's products and attention lose.  So every bound is of something that
this processor did in the same run: sublayers and the head are compared with those of stock vLLM,
which has standard residuals and the same weights, and the whole with the same engine where its
sites lose nothing.  The unit is what the rounding of stored activations makes (``rounded.py``).
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from checkpoints import write_house, write_standard
from jobs import VOCABULARY, run_verify

from attnres_serve.settings import ALGORITHMS

SHAPE = {"layers": 6, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 192}
BITS = [0, 2]  # that linear layers lose: none more than here, and as on a coarser processor

on_each_backend = pytest.mark.parametrize(
    "backend", ["cpp", pytest.param("torch", marks=pytest.mark.exhaustive)]
)

# The error of a site, in units of what the rounding of its result makes.  Scores, softmax and mix
# are float32, whose roundings of 2^-24 add nothing to one of 2^-9; with scores, folded queries or
# depth weights in bfloat16 it would be 1.05 to 1.6.  Only the answers of two-phase with cpp are
# rounded too, which adds as much at most, thus sqrt(2), and some more where sources cancel.
SITE = 1.01
SITE_OF_ROUNDED_ANSWERS = 1.5
# The error of a sublayer over that of stock vLLM's.  Their inputs differ, and with them how much
# the rounding of attention's weights counts.  A bit that was lost would double it: this is half of
# that way.
PART = 2**0.5
# The engine's distance over that with sites which lose nothing.  They differ by chance alone: the
# square roots of 600 divergences spread by 0.75 of their mean, as those of normal numbers do, so a
# mean is off by 3 % and a ratio of two by 4.4 %; four times that is allowed.
WHOLE = 1.2


def choices(backend: str) -> list[dict[str, str]]:
    """Every algorithm on a backend."""
    return [{"attnres_algorithm": name, "attnres_backend": backend} for name in ALGORITHMS]


def job(folder: Path, chosen: dict[str, str], fewer: list[int], **env: str) -> dict[str, Any]:
    """A job on three passages of 200 tokens."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, VOCABULARY, (3, 200), generator=generator).tolist()
    own = {"served": str(folder), "reference": str(folder), "prompts": prompts, "chosen": chosen}
    return own | {"dtype": "bfloat16", "judge": "rounded", "fewer": fewer, "env": env}


def uneven(folder: Path) -> Path:
    """A checkpoint whose largest depth weight is 0.7 on average, by random queries."""
    return write_house(folder, block_size=3, **SHAPE)


def distance(kl: list[float]) -> float:
    """The mean square root of KL divergences.

    KL goes with the square of an error, and its mean hangs on a few tokens at which the function is
    most sensitive.
    """
    return fmean(math.sqrt(max(0.0, one)) for one in kl)


def beyond(found: dict[str, list[float]], stock: dict[str, list[float]], site: float) -> list[str]:
    """What loses more than it may, with the excess as a ratio."""
    ratios = {f"site {at}": loss / site for at, loss in enumerate(found["sites"], 1)}
    pairs = zip(found["parts"], stock["parts"], strict=True)
    ratios |= {f"part {at}": own / usual / PART for at, (own, usual) in enumerate(pairs)}
    ratios["the whole"] = distance(found["kl"]) / distance(found["ideal"]) / WHOLE
    return [f"{name}: {ratio:.3f}" for name, ratio in ratios.items() if not ratio <= 1]


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[int, dict[str, list[float]]]:
    """What stock vLLM loses on this processor, without the plugin: by the bits that it loses."""
    root = tmp_path_factory.mktemp("stock")
    asked = job(write_standard(root / "model", **SHAPE), {}, BITS, VLLM_PLUGINS="")
    (found,) = run_verify([asked], root / "run")
    return dict(zip(BITS, found, strict=True))


@pytest.mark.engine
@on_each_backend
def test_uneven_depth_weights(backend, stock, tmp_path):
    """Sites are as exact as their results' format, the rest as stock vLLM here and on others.

    Sublayers that lose two bits where those of stock vLLM do not are beyond the bound.
    """
    served = uneven(tmp_path / "model")
    results = run_verify([job(served, one, BITS) for one in choices(backend)], tmp_path / "run")
    for chosen, found in zip(choices(backend), results, strict=True):
        rounds = (chosen["attnres_algorithm"], chosen["attnres_backend"]) == ("two_phase", "cpp")
        site = SITE_OF_ROUNDED_ANSWERS if rounds else SITE
        for bits, own in zip(BITS, found, strict=True):
            assert len(own["sites"]) == 2 * SHAPE["layers"]
            assert not beyond(own, stock[bits], site), (chosen, bits, own["parts"], own["sites"])
        wrong = beyond(found[1], stock[0], site)
        assert len(wrong) == 2 * SHAPE["layers"] and all("part" in one for one in wrong), wrong


@pytest.mark.engine
@pytest.mark.exhaustive
def test_uneven_depth_weights_compiled(tmp_path):
    """A compiled engine, whose sites cannot be listened to, is no further off than an eager one."""
    served, chosen = uneven(tmp_path / "model"), choices("cpp")[-1]
    assert chosen["attnres_algorithm"] == "two_phase"
    eager = job(served, chosen, [0])
    asked = {"compiled": [str(served)], "prompts": eager["prompts"], "chosen": chosen}
    (kl,), (found,) = run_verify([asked | {"dtype": "bfloat16"}, eager], tmp_path / "run")
    assert distance(kl) <= WHOLE * distance(found["ideal"])
