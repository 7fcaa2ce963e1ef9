"""Replace weights in an engine that has answered: ``python replace_jobs.py JOBS RESULTS``.

Both are JSON files.  A job is {checkpoint, prompts, dtype, steps}; a step is [how, folder of the
weights].  How is a method of vLLM's workers; ``called`` for a function that calls reload_weights in
a worker; ``busy`` for reload_weights while a request runs.  Its result holds for the start and each
step why it was refused, None where it was not, and what the prompts are answered then: greedy
tokens, their logprobs, and how many tokens of the longest came from the prefix cache when it was
asked first and again.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from engine import answers

NEW_TOKENS = 8


def replace(llm, how: str, folder: str) -> str | None:
    """Why a step is refused; None where it is not."""
    from vllm import SamplingParams

    engine, given = llm.llm_engine, {"weights_path": folder}
    try:
        if how == "called":
            llm.collective_rpc(lambda worker: worker.reload_weights(**given))
        elif how == "busy":
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            engine.add_request("busy", {"prompt_token_ids": [3, 5]}, sampling)
            engine.step()
            llm.collective_rpc("reload_weights", kwargs=given)
        else:
            llm.collective_rpc(how, kwargs=given)
    except ValueError as error:
        return str(error)
    finally:
        engine.abort_request(["busy"])
        while engine.has_unfinished_requests():
            engine.step()
    return None


def ask(llm, prompts: list[list[int]]) -> dict[str, Any]:
    first = [answers(llm, [prompt], NEW_TOKENS, False, None)[0] for prompt in prompts]
    (again,) = answers(llm, [max(prompts, key=len)], NEW_TOKENS, False, None)
    cached = [found.pop("cached") for found in (*first, again)]
    return {"answers": first, "again": again, "cached": cached[-2:]}


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM

    gc.collect()
    llm = LLM(
        job["checkpoint"],
        dtype=job["dtype"],
        max_model_len=256,
        enforce_eager=True,
        distributed_executor_backend="uni",
    )
    found = [{"refused": None} | ask(llm, job["prompts"])]
    for step in job["steps"]:
        found.append({"refused": replace(llm, *step)} | ask(llm, job["prompts"]))
    llm.llm_engine.engine_core.shutdown()
    return found


def main(jobs: str, results: str) -> None:
    Path(results).write_text(json.dumps([run(job) for job in json.loads(Path(jobs).read_text())]))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
