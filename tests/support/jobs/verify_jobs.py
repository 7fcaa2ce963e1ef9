"""Verify checkpoints one after the other in one process: ``python verify_jobs.py JOBS RESULTS``.

A job is {served, reference, prompts, chosen, dtype}.  In float32 its result is the report; in
another dtype it is per token the KL divergence from the float64 model.

With {fault: name of a function of ``planted.py``} it is served with that fault, and so is what
follows.

With {judge: "family"} the reference is of any family.

With {judge: "rounded", fewer: bits that linear layers lose, one after the other, env: environment
variables} the result has for each of them ``kl``; ``ideal``, the same with sites that lose nothing
(``ideal_sites.py``); and what ``sites`` and other ``parts`` lost (``rounded.py``).

Or it is {compiled: folders alike but for their weights, prompts, chosen, dtype}: one compiled
engine serves them all, and the result is ``kl`` for each.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import planted
import tiny_sites
import torch
from coarse_products import coarse_products
from ideal_sites import ideal_sites
from rounded import divergence, part_losses, rounded_model
from torch import Tensor

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.verify import compare, oracle


def run(job: dict[str, Any]) -> Any:
    if "compiled" in job:
        return run_compiled(**job)
    served, reference = Path(job["served"]), Path(job["reference"])
    if fault := job.get("fault"):
        getattr(planted, fault)()
    if job.get("judge") == "rounded":
        return losses(served, reference, job)
    if job["dtype"] == "float32":
        parsed = check_folder(reference).translated(str(reference))
        model = compare.reference(reference, parsed)
        return asdict(compare.verify(served, model, job["prompts"], job["chosen"]))
    load = tiny_sites.load if job.get("judge") == "family" else oracle.load
    with torch.inference_mode():
        passages = compare.serve(served, job["prompts"], job["chosen"], job["dtype"])
        return kl(load(reference), passages)


def kl(model: Any, passages: Iterable[compare.Passage]) -> list[float]:
    kept = [*passages]
    tables = [passage.logits.double().log_softmax(-1) for passage in kept]
    return divergence(model, [passage.ids for passage in kept], tables)


def losses(served: Path, reference: Path, job: dict[str, Any]) -> list[dict[str, list[float]]]:
    os.environ.update(job["env"])
    prompts, found = job["prompts"], []
    with torch.inference_mode():
        model = oracle.load(reference)
        judge, has_sites = rounded_model(model), model.spec.block_starts is not None
        every = prompts * 2 * len(job["fewer"])
        # Each prompt runs when its passage is asked for.
        passages = compare.serve(served, every, job["chosen"], job["dtype"])
        for fewer in job["fewer"]:
            with coarse_products(fewer):
                own = [*islice(passages, len(prompts))]
                with ideal_sites(judge):
                    ideal = [*islice(passages, len(prompts))]
            row = {"kl": kl(model, own), "ideal": kl(model, ideal)}
            sites = judge.site_losses(own) if has_sites else []
            found.append(row | {"parts": part_losses(model, own), "sites": sites})
        passages.close()
    assert ("attnres_serve.plugin" in sys.modules) == has_sites, "stock is without the plugin"
    return found


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
