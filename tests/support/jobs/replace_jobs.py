"""Replace weights in an engine that has answered: ``python replace_jobs.py JOBS RESULTS``.

Both are JSON files.  A job is {checkpoint, prompts, dtype, mode: eager | compiled, options: further
ones of ``vllm.LLM``, steps}; a step is [how, folder of the weights, more folders of one update].
How is a method of vLLM's workers; ``tensors`` for reload_weights by an iterator, in another order
than the files have; ``partial`` for one that is declared so; ``transfer`` for an update by a
transfer engine in two pieces, and ``draft`` for one of the draft model; ``routes`` for one by the
routes of a server; ``called`` for a function that calls reload_weights in a worker, and ``model``
for one that gives tensors to the worker's model; ``busy`` for reload_weights while a request runs.
Its result holds for the start and each step why it was refused, None where it was not, and what the
prompts are answered then: greedy tokens, their logprobs, how many tokens of the longest came from
the prefix cache when it was asked first and again, and how many drafts were taken; or why they are
not answered.
"""

import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from engine import answers, inspect_here

NEW_TOKENS = 8


def tensors(folders: list[str]) -> list[tuple[str, Any]]:
    from attnres_serve.checkpoints import read

    found = [
        pair for name in folders for path in read.files(Path(name)) for pair in read.tensors(path)
    ]
    random.shuffle(found)
    return found


def replace(llm, how: str, *folders: str) -> str | None:
    """Why a step is refused; None where it is not."""
    from vllm import SamplingParams

    engine, given = llm.llm_engine, {"weights_path": folders[-1] if folders else None}
    try:
        if how == "called":
            refused = llm.collective_rpc(lambda worker: worker.reload_weights(**given))
            return refused[0]["problem"]
        if how == "model":
            llm.apply_model(lambda model: model.load_weights(iter(tensors(folders))))
        elif how == "busy":
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            engine.add_request("busy", {"prompt_token_ids": [3, 5]}, sampling)
            engine.step()
            llm.collective_rpc("reload_weights", kwargs=given)
        elif how in ("tensors", "partial"):
            given = {"weights_iterator": iter(tensors(folders))}
            given |= {"is_partial": True} if how == "partial" else {}
            llm.collective_rpc("reload_weights", kwargs=given)
        elif how in ("transfer", "draft"):
            transfer(llm, how, tensors(folders))
        elif how == "routes":
            import weight_routes

            weight_routes.update(engine, tensors(folders))
        else:
            llm.collective_rpc(how, kwargs=given)
    except ValueError as error:
        return str(error)
    finally:
        engine.abort_request(["busy"])
        while engine.has_unfinished_requests():
            engine.step()
    return None


def transfer(llm, how: str, pairs: list[tuple[str, Any]]) -> None:
    from attnres_serve.compat import tensor_file

    llm.init_weight_transfer_engine({"init_info": {}})
    if how == "draft":
        llm.start_draft_weight_update()
    else:
        llm.start_weight_update()
    for piece in (pairs[::2], pairs[1::2]):
        with tensor_file.file_of(piece) as path:
            llm.update_weights({"update_info": {"path": path}})
    llm.finish_weight_update("newer")
    assert llm.get_weight_version() == "newer"


def ask(llm, prompts: list[list[int]]) -> dict[str, Any]:
    before = drafts(llm)
    try:
        first = [answers(llm, [prompt], NEW_TOKENS, False, None)[0] for prompt in prompts]
    except ValueError as error:
        return {"unanswered": str(error)}
    (again,) = answers(llm, [max(prompts, key=len)], NEW_TOKENS, False, None)
    cached = [found.pop("cached") for found in (*first, again)]
    taken = drafts(llm) - before
    return {"answers": first, "again": again, "cached": cached[-2:], "drafts": taken}


def drafts(llm) -> int:
    """How many drafted tokens were taken since the start."""
    if not llm.llm_engine.log_stats:
        return 0
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(found.value for found in llm.get_metrics() if found.name == name)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from vllm import LLM

    gc.collect()
    torch.compiler.reset()
    llm = LLM(
        job["checkpoint"],
        dtype=job["dtype"],
        max_model_len=256,
        enforce_eager=job["mode"] == "eager",
        **{"distributed_executor_backend": "uni"} | job["options"],
    )
    found = [{"refused": None} | ask(llm, job["prompts"])]
    for step in job["steps"]:
        found.append({"refused": replace(llm, *step)} | ask(llm, job["prompts"]))
    llm.llm_engine.engine_core.shutdown()
    return found


def main(jobs: str, results: str) -> None:
    inspect_here()
    Path(results).write_text(json.dumps([run(job) for job in json.loads(Path(jobs).read_text())]))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
