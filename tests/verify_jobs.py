"""Verify checkpoints one after the other in one process: ``python verify_jobs.py JOBS RESULTS``.

A job is {served, reference, prompts, chosen, dtype}.  In float32 its result is the report, in
another dtype the mean KL divergence from the float64 model.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attnres_serve import oracle, verify


def run(job: dict[str, Any]) -> Any:
    served, reference = Path(job["served"]), Path(job["reference"])
    if job["dtype"] == "float32":
        return asdict(verify.verify(served, reference, job["prompts"], job["chosen"]))
    with torch.inference_mode():
        model = oracle.load(reference)
        passages = verify.serve(served, job["prompts"], job["chosen"], job["dtype"])
        kl = [verify.whole(passage, model.logprobs(passage.ids))["kl"] for passage in passages]
        return torch.cat(kl).mean().item()


if __name__ == "__main__":
    jobs, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([run(job) for job in json.loads(jobs.read_text())]))
