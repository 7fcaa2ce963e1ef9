"""Verify checkpoints one after the other in one process: ``python verify_jobs.py JOBS RESULTS``.

A job is {served, reference, prompts, algorithm, against}; its result is the report.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnres_serve import verify


def run(job: dict[str, Any]) -> dict[str, Any]:
    served, reference = Path(job["served"]), Path(job["reference"])
    chosen = {"attnres_algorithm": job["algorithm"]}
    return asdict(verify.verify(served, reference, job["prompts"], chosen, job["against"]))


if __name__ == "__main__":
    jobs, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([run(job) for job in json.loads(jobs.read_text())]))
