"""One of ``benchmarks.peers``, in a process of its own, as ``attnres_serve.bench.process`` runs it.

It is a script, and nothing of ``attnres_serve`` is imported but as a plugin by vLLM.  The
arguments are ``hf``, folder, dtype and style, or ``vllm`` and the JSON of ``vllm.LLM``'s options.
The first line on stdout says what runs; from then on every line on stdin is a request in JSON and
every line on stdout its answer: to ``{"what": "generate", "requests": [[prompt, output tokens],
...]}`` the seconds until all are done and the tokens of each, to ``{"what": "facts"}`` what runs.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONCURRENT = 8  # requests that are computed together, at most
Requests = list[tuple[list[int], int]]
Generate = Callable[[Requests], list[list[int]]]
State = Callable[[], dict[str, Any]]


def hugging_face(folder: str, dtype: str, style: str, compiled: str = "") -> tuple[Generate, State]:
    """transformers' cached ``generate``, requests in padded batches in order of arrival."""
    import torch
    from transformers import CompileConfig

    sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed
    from benchmarks.peers.models import STYLES, AttnResLlamaForCausalLM

    llm = AttnResLlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    llm.model.site = STYLES[style]
    llm.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if compiled:
        # transformers' own way to compile decode steps; on a CPU only by this switch of its tests.
        compilation = CompileConfig(dynamic=False)
        compilation._compile_all_devices = True
        options |= {"cache_implementation": "static", "compile_config": compilation}

    def generate(requests: Requests) -> list[list[int]]:
        answers = []
        for first in range(0, len(requests), CONCURRENT):
            prompts, wanted = zip(*requests[first : first + CONCURRENT], strict=True)
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
            done = llm.generate(ids, attention_mask=mask, max_new_tokens=max(wanted), **options)
            rows = done[:, width:].tolist()
            answers += [row[:number] for row, number in zip(rows, wanted, strict=True)]
        return answers

    facts: dict[str, Any] = {"plugin_loaded": False, "backend": None, "executed": {}}
    return generate, lambda: {**facts, "compiled": graphs() > 0}


def vllm(options: str) -> tuple[Generate, State]:
    """vLLM's engine, with our plugin if its environment lets it load."""
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(options))

    def generate(requests: Requests) -> list[list[int]]:
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=wanted, **greedy) for _, wanted in requests]
        inputs = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in done]

    def state() -> dict[str, Any]:
        plugin = "attnres_serve" in sys.modules
        return {
            "plugin_loaded": plugin,
            "compiled": llm.llm_engine.vllm_config.compilation_config.mode.name != "NONE",
            "backend": llm.collective_rpc("attn_res_backend")[0] if plugin else None,
            "executed": llm.collective_rpc("attn_res_executed")[0] if plugin else {},
        }

    return generate, state


def graphs() -> int:
    """Number of graphs that were compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _call(generate: Generate, requests: Requests) -> list[list[int]]:
    return generate(requests)


def main(kind: str, *arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries write to stdout
    make: Callable[..., tuple[Generate, State]] = hugging_face if kind == "hf" else vllm
    begin = time.perf_counter()
    generate, state = make(*arguments)
    start_s = time.perf_counter() - begin
    # Room for the frames of all that it calls, alike for all peers, as ``bench.engine`` makes it.
    _call.__code__ = _call.__code__.replace(co_stacksize=1 << 15)

    def facts() -> dict[str, Any]:
        return {**state(), "graphs": graphs(), "start_s": start_s}

    answers.write(json.dumps(facts()) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "facts":
            answer = facts()
        else:
            begin = time.perf_counter()
            tokens = _call(generate, request["requests"])
            answer = {"seconds": time.perf_counter() - begin, "tokens": tokens}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
