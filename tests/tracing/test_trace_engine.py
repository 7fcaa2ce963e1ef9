"""Traces in engines that serve other requests meanwhile, against the float64 model.

Every trace is taken with edits and without: an edit reaches no request and no other trace.
Chunked prefill, prefix caching and batches are on in all of them; the traced prompt is longer than
a chunk, and one of those that are served.
"""

from pathlib import Path

import pytest
import torch
from edited_oracle import by_numbers, evaluate, mixing_sites, some, sources_at
from jobs import fresh_prompts, run_trace_jobs
from lens_oracle import Key, lens
from serving import GOLDENS
from trace_cases import FAR, LOGPROBS, wanted

from attnres_serve.verify.oracle import Model, load

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

CHUNK = 32
LENGTH = 150  # of the prompt that is traced
BLOCK = "fla_transformer_block"
LAYERS, IN_MID_BLOCK = 5, 3  # of the first stage
TWO = {"distributed_executor_backend": "mp"}

# Every algorithm and backend, eager and compiled, on five formats.  The single pass compiled has a
# test for every version of vLLM; eager it is also traced in a server that is asked meanwhile.
JOBS = [
    ("qwen3_attnres_cumulative_block", "two_phase", "cpp", "eager"),
    (BLOCK, "two_phase", "torch", "eager"),
    (BLOCK, "single_pass", "cpp", "eager"),
    ("nanogpt_block", "two_phase", "cpp", "eager"),
    ("baseline_attnres", "single_pass", "cpp", "eager"),
    (BLOCK, "two_phase", "cpp", "compiled"),
    ("nanogpt_block", "single_pass", "cpp", "compiled"),
    ("qwen3_attnres_full", "two_phase", "torch", "compiled"),
]


def job(golden: str, algorithm: str, backend: str, mode: str, env=None, **options) -> dict:
    model = load(GOLDENS / golden)
    return {
        "checkpoint": str(GOLDENS / golden),
        "prompts": fresh_prompts((LENGTH, 5, 25)),  # the KV cache has blocks of 128 tokens
        "algorithm": algorithm,
        "backend": backend,
        "mode": mode,
        "chunk": CHUNK,
        "readings": [reading for _, reading in newest(model)],
        "edits": [by_numbers(model, edit) for edit in some(model, LENGTH)],
        "options": options,
        "env": env or {},
    }


def newest(model: Model) -> list[tuple[Key, list[int]]]:
    """The mix and the newest source of every site: by name, and as workers take them."""
    found: list[tuple[Key, list[int]]] = []
    for site in mixing_sites(model):
        *_, name = own = sources_at(model, site)
        found.append(((site, "mix"), [site, -1]))
        found.append(((site if name == "partial" else None, name), [site, len(own) - 1]))
    return found


def check(jobs: list[dict], folder: Path) -> None:
    """Run the jobs in one process; every trace, and every answer beside it, is right."""
    for asked, result in zip(jobs, run_trace_jobs(jobs, folder), strict=True):
        model, ids = load(Path(asked["checkpoint"])), asked["prompts"][0]
        close(result["traces"], *wanted(model, ids))
        weights, rms, logprobs = evaluate(model, ids, some(model, LENGTH))
        close(result["edited"], weights, rms)
        following = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found = torch.tensor(result["following"]).double()
        torch.testing.assert_close(found, following, atol=LOGPROBS, rtol=0)
        table = lens(model, ids, some(model, LENGTH))
        for (key, _), by_token in zip(newest(model), result["lens"], strict=True):
            own = table[key][:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(by_token).double(), own, atol=LOGPROBS, rtol=0)
        answers = [model.greedy(prompt, 8)[0] for prompt in asked["prompts"]]
        assert result["answers"] == [answers] * 2
        assert result["cached"][1] > 0
        compiled = asked["mode"] == "compiled"
        assert (result["executed"]["compiled"] > 0, result["executed"]["eager"] > 0) == (
            compiled,
            not compiled,
        )


def close(traces: list, weights: list[torch.Tensor], rms: list[torch.Tensor]) -> None:
    """All of them have these weights and magnitudes."""
    assert len(traces) == 5
    for trace in traces:
        assert [index for index, *_ in trace] == list(range(len(weights)))
        for index, own, size in trace:
            torch.testing.assert_close(torch.tensor(own).double(), weights[index], atol=FAR, rtol=0)
            torch.testing.assert_close(torch.tensor(size).double(), rms[index], atol=FAR, rtol=FAR)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_beside_other_requests(mode, tmp_path):
    check([job(*ways) for ways in JOBS if ways[-1] == mode], tmp_path)


@pytest.mark.versions
def test_compiled_in_every_version(tmp_path):
    check([job(BLOCK, "single_pass", "cpp", "compiled")], tmp_path)


def test_two_workers_share_the_heads(tmp_path):
    ways = job(BLOCK, "two_phase", "cpp", "eager", tensor_parallel_size=2, **TWO)
    check([ways], tmp_path)


def test_a_stage_that_starts_inside_a_block(tmp_path):
    """What travels between the stages in a replay does not mix with what steps send."""
    env = {"VLLM_PP_LAYER_PARTITION": f"{IN_MID_BLOCK},{LAYERS - IN_MID_BLOCK}"}
    ways = job(BLOCK, "two_phase", "cpp", "compiled", env, pipeline_parallel_size=2, **TWO)
    check([ways], tmp_path)
