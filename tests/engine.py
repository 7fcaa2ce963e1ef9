"""Run a golden through ``vllm.LLM`` and write what was found: a process of its own, so that an
engine that hangs or dies is not the test runner's."""

import json
import sys
from pathlib import Path

from serving import differences, expected


def answers(llm, prompts: list[list[int]], prompt_logprobs: bool) -> list:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=16,
        logprobs=0,
        prompt_logprobs=0 if prompt_logprobs else None,
        ignore_eos=True,
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False)


def unpack(request) -> tuple:
    tokens = list(request.outputs[0].token_ids)
    steps = zip(request.outputs[0].logprobs, tokens, strict=True)
    logprobs = [step[token].logprob for step, token in steps]
    if request.prompt_logprobs is None:
        return None, tokens, logprobs
    pairs = zip(request.prompt_logprobs[1:], request.prompt_token_ids[1:], strict=True)
    return [entry[token].logprob for entry, token in pairs], tokens, logprobs


def main(golden: str, algorithm: str, mode: str, chunk: str, result: str) -> None:
    from vllm import LLM

    limits = {"max_num_batched_tokens": int(chunk), "max_num_seqs": 8} if int(chunk) else {}
    llm = LLM(
        golden,
        dtype="float32",
        max_model_len=256,
        enforce_eager=mode == "eager",
        additional_config={"attnres_algorithm": algorithm},
        **limits,
    )
    cases = expected(Path(golden))
    found: list[str] = []
    for case in cases:
        (request,) = answers(llm, [case["prompt"]], prompt_logprobs=True)
        found += differences(case, *unpack(request))
    batch = answers(llm, [case["prompt"] for case in cases], prompt_logprobs=True)
    for case, request in zip(cases, batch, strict=True):
        found += differences(case, *unpack(request))
    longest = max(cases, key=lambda case: len(case["prompt"]))
    for _ in range(2):
        (request,) = answers(llm, [longest["prompt"]], prompt_logprobs=False)
        found += differences(longest, *unpack(request))
    if not request.num_cached_tokens:
        found.append("the second request was not answered from the prefix cache")
    (passes,) = llm.collective_rpc("attn_res_executed")
    info = {
        "found": found,
        "algorithm": algorithm,
        "executed": {name: sum(counts.values()) for name, counts in passes.items()},
        "executed_compiled": {name: counts["compiled"] for name, counts in passes.items()},
    }
    Path(result).write_text(json.dumps(info))


if __name__ == "__main__":
    main(*sys.argv[1:])
