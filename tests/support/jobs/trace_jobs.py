"""Trace in an engine that serves others meanwhile: ``python trace_jobs.py JOBS RESULTS``.

Both are JSON files.  A job is {checkpoint, prompts, mode: eager | compiled, algorithm, backend,
chunk: tokens per step, edits, and readings of a lens: both as workers take them, options: further
ones of ``vllm.LLM``, env: environment variables}; the first prompt is traced: before it was ever
served, while all of them are being served, and when it comes from the prefix cache, each time with
the edits first.  Its result holds those traces, the logprobs of the last edited one and those by
each reading, the greedy answers and the counters.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine import lens, logprobs, trace

NEW_TOKENS = 8
AT_STEPS = (2, 5, 9)  # in the prefill of the first prompt, and in decode


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    gc.collect()
    torch.compiler.reset()
    os.environ.update(job["env"])
    options = {"distributed_executor_backend": "uni"} | job["options"]
    llm = LLM(
        job["checkpoint"],
        dtype="float32",
        max_model_len=256,
        enforce_eager=job["mode"] == "eager",
        max_num_batched_tokens=job["chunk"],
        max_num_seqs=4,
        additional_config={
            "attnres_algorithm": job["algorithm"],
            "attnres_backend": job["backend"],
        },
        **options,
    )
    assert set(llm.collective_rpc("attn_res_untraceable")) == {None}
    passes = llm.collective_rpc("attn_res_executed")
    asked, edits = job["prompts"][0], job["edits"]
    edited = [trace(llm, asked, edits)]
    traces = [trace(llm, asked)]
    assert llm.collective_rpc("attn_res_executed") == passes  # a replay is none that serves
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine, answers, cached, steps = llm.llm_engine, [], [], 0
    for turn in range(2):  # the second time from the prefix cache
        done = {}
        for number, prompt in enumerate(job["prompts"]):
            engine.add_request(f"{turn}-{number}", tokens_input(prompt), greedy)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            steps += 1
            if steps in AT_STEPS:
                assert len(done) < len(job["prompts"])
                edited.append(trace(llm, asked, edits))
                traces.append(trace(llm, asked))
        ended = [done[f"{turn}-{number}"] for number in range(len(job["prompts"]))]
        answers.append([list(output.outputs[0].token_ids) for output in ended])
        cached.append(max(output.num_cached_tokens or 0 for output in ended))
    edited.append(trace(llm, asked, edits))
    traces.append(trace(llm, asked))
    (passes,) = {json.dumps(worker) for worker in llm.collective_rpc("attn_res_executed")}
    following = logprobs(llm, asked, edits)
    read = lens(llm, asked, edits, job["readings"])
    llm.llm_engine.engine_core.shutdown()
    return {
        "traces": traces,
        "edited": edited,
        "following": following,
        "lens": read,
        "answers": answers,
        "cached": cached,
        "executed": json.loads(passes)[job["algorithm"]],
    }


def main(jobs: str, results: str) -> None:
    Path(results).write_text(json.dumps([run(job) for job in json.loads(Path(jobs).read_text())]))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
