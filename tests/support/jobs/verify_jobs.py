"""Verify checkpoints one after the other in one process: ``python verify_jobs.py JOBS RESULTS``.

A job is {served, reference, prompts, chosen, dtype}.  In float32 its result is the report; in
another dtype ``kl``, per token the KL divergence from the float64 model, and ``losses``, per site
of AttnRes what it lost (``rounded.py``).

With {judge: "family"} the reference is of any family, and the result is ``kl``.

Or it is {compiled: folders alike but for their weights, prompts, chosen, dtype}: one compiled
engine serves them all, and the result is ``kl`` for each.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tiny_sites
import torch
from rounded import divergence, rounded_model
from torch import Tensor

from attnres_serve.verify import compare, oracle


def run(job: dict[str, Any]) -> Any:
    if "compiled" in job:
        return run_compiled(**job)
    served, reference = Path(job["served"]), Path(job["reference"])
    if job.get("judge") == "family":
        return kl_of_family(served, reference, job)
    if job["dtype"] == "float32":
        model = compare.reference(reference)
        return asdict(compare.verify(served, model, job["prompts"], job["chosen"]))
    with torch.inference_mode():
        model = oracle.load(reference)
        passages = [*compare.serve(served, job["prompts"], job["chosen"], job["dtype"])]
        tables = [passage.logits.double().log_softmax(-1) for passage in passages]
        result = {"kl": divergence(model, job["prompts"], tables), "losses": []}
        if model.spec.block_starts is not None:
            result["losses"] = rounded_model(model).losses(passages)
        return result


def kl_of_family(served: Path, reference: Path, job: dict[str, Any]) -> list[float]:
    with torch.inference_mode():
        passages = [*compare.serve(served, job["prompts"], job["chosen"], job["dtype"])]
        tables = [passage.logits.double().log_softmax(-1) for passage in passages]
        return divergence(tiny_sites.load(reference), job["prompts"], tables)


def run_compiled(
    compiled: list[str], prompts: list[list[int]], chosen: dict[str, str], dtype: str
) -> list[list[float]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        compiled[0],
        dtype=dtype,
        max_model_len=256,
        max_logprobs=-1,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        additional_config=chosen,
    )
    every = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for folder in compiled:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        answers = llm.generate(inputs, every, use_tqdm=False)
        tables = [table(answer.prompt_logprobs[1:]) for answer in answers]
        found.append(divergence(oracle.load(folder), prompts, tables))
    (passes,) = llm.collective_rpc("attn_res_executed")
    assert all(counts["eager"] == 0 for counts in passes.values())
    assert passes[chosen["attnres_algorithm"]]["compiled"] > 0
    llm.llm_engine.engine_core.shutdown()
    return found


def table(rows: list[dict[int, Any]]) -> Tensor:
    """vLLM's logprobs of all tokens, ``[rows, vocabulary]``."""
    every = [[row[token].logprob for token in range(len(row))] for row in rows]
    return torch.tensor(every, dtype=torch.float64)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    jobs, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([run(job) for job in json.loads(jobs.read_text())]))
