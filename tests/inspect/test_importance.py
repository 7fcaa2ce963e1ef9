"""Importance maps: batches equal single edits, and a file is continued where it ended."""

import random
from types import SimpleNamespace

import pytest
import torch
from edited_oracle import evaluate, mixing_sites, sources_at
from jobs import fresh_prompts
from serving import GOLDENS

pytest.importorskip("vllm")

from in_process import world
from trace_cases import LOGPROBS, worker_of
from vllm.config import set_current_vllm_config

from attnres_serve.compat import replay
from attnres_serve.inspect import importance
from attnres_serve.verify import oracle
from attnres_serve.worker import WorkerExtension

NAMES = ("fla_transformer_block", "qwen3_attnres_cumulative_block", "nanogpt_block")
LENGTH = 13
# Sums of float32 in another order, through as many sublayers.
FAR = 2e-5


@pytest.fixture(scope="module", autouse=True)
def one_world():
    random.seed()
    with world(GOLDENS / NAMES[0]):
        yield


def measured(worker: SimpleNamespace, ids: list[int], bans: list) -> list[float]:
    with set_current_vllm_config(worker.vllm_config):
        found = WorkerExtension.attn_res_importance(worker, ids, bans)
    assert found["problem"] is None
    return found["means"]


@pytest.mark.parametrize("golden", NAMES)
def test_a_batch_equals_single_edits(golden):
    """And both the float64 model with the same edits, whichever of its bans stand together."""
    worker, model = (
        worker_of(GOLDENS / golden, "two_phase", "cpp", 64),
        oracle.load(GOLDENS / golden),
    )
    (ids,) = fresh_prompts((LENGTH,))
    every = [
        (site, column)
        for site in mixing_sites(model)
        if len(sources_at(model, site)) > 1
        for column in range(len(sources_at(model, site)))
    ]
    copies = replay.most_copies(worker, LENGTH)
    assert copies == 4  # the most sequences of the engine
    bans = [importance.NOTHING, *random.sample(every, 7)]
    batches = [measured(worker, ids, bans[at : at + copies]) for at in (0, copies)]
    alone = [measured(worker, ids, [ban])[0] for ban in bans]
    torch.testing.assert_close(
        [mean for batch in batches for mean in batch], alone, atol=FAR, rtol=0
    )
    following = torch.tensor(ids[1:])[:, None]
    for (site, column), mean in zip(bans, alone, strict=True):
        edits = []
        if site >= 0:
            sources = [sources_at(model, site)[column]]
            edits = [
                {"sites": [site], "sources": sources, "tokens": list(range(LENGTH)), "ban": True}
            ]
        logprobs = evaluate(model, ids, edits)[2][:-1].gather(1, following)
        assert abs(mean - logprobs.mean().item()) < LOGPROBS
