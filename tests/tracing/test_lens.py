"""A depth lens against the float64 models, by a worker in this process."""

import random

import pytest
import tiny_sites
from checkpoints import write_house
from jobs import fresh_prompts
from lens_oracle import lens_by_class

pytest.importorskip("vllm")

from in_process import world
from trace_cases import BLOCK, LOGPROBS, check_lens, replayed, worker_of

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.tracing import readings

LENGTH = 21


@pytest.fixture(scope="module", autouse=True)
def one_world():
    random.seed()
    with world(BLOCK):
        yield


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_the_sources_after_the_last_norm(name, tmp_path):
    """A norm of weight 1 + w and capped logits, and logits that are divided.

    Weights and tokens are fixed: with random ones, float32 is now and then twenty times as far
    from float64 as here, as attention and norms may magnify a rounding by any factor.  What is
    behind the last norm depends neither on them nor on more than two layers.
    """
    write_house(tmp_path, name, layers=2, block_size=3, seed=0)
    ids = [(7 * i * i + 3 * i + 5) % 320 for i in range(LENGTH)]
    worker = worker_of(tmp_path, "two_phase", "cpp", 64)
    check_lens(replayed(worker, ids).lens, lens_by_class(tiny_sites.load(tmp_path), ids), ids)


def test_the_last_mix_is_what_the_model_predicts():
    """To the rounding of two norms of the same numbers, also under edits."""
    worker = worker_of(BLOCK, "single_pass", "torch", 64)
    (ids,) = fresh_prompts((LENGTH,))
    for edits in ([], [{"sites": ["final", 4], "sources": ["embedding"], "mask": True}]):
        whole = replayed(worker, ids, edits)
        top, values, following = whole.predicted
        for row, found in enumerate(whole.lens[10, "mix"]):
            assert [token["id"] for token in found["top"]] == top[row].tolist()
            named = [token["logprob"] for token in found["top"]]
            assert named == pytest.approx(values[row].tolist(), abs=LOGPROBS)
            assert found["next"] is None or abs(found["next"] - following[row]) < LOGPROBS


def test_every_sum_is_read_once():
    """Blocks of three sublayers in two layers; also where only some sites are traced."""
    every = sites(AttnResSpec.uniform(Layout.of(2), 3, 1e-6))
    mix = readings.MIX
    assert readings.readings(every) == [
        (0, mix), (0, 0),  # the embedding
        (1, mix), (1, 1),
        (2, mix), (2, 1),
        (3, mix), (3, 1),  # block 1, which opens here
        (4, mix), (4, 2),
    ]  # fmt: skip
    assert readings.readings(every[4:]) == [(4, mix), (4, 0), (4, 1), (4, 2)]
