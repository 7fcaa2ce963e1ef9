"""A contender of ``benchmarks.peers``, in a process of its own.

Every line on stdin is a request in JSON and every line on stdout its answer: to
``{"requests": [[prompt, output tokens], ...]}`` the seconds until all are done and the tokens of
each, to ``{}`` what runs here.  Nothing of ``attnres_serve`` is imported but as a plugin by vLLM.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONCURRENT = 8  # requests that are computed together, at most
LENGTH = 512  # tokens of a request, at most
Requests = list[tuple[list[int], int]]
Generate = Callable[[Requests], list[list[int]]]
State = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Contender:
    """transformers in a style of ``peer_models``, our plugin, or with neither set plain vLLM."""

    name: str
    compiled: bool
    style: str | None = None
    algorithm: str | None = None
    backend: str | None = None


def hugging_face(contender: Contender, model: str, dtype: str) -> tuple[Generate, State]:
    """transformers' cached ``generate``, requests in padded batches in order of arrival."""
    import torch
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    from benchmarks.peer_models import STYLES, AttnResLlamaForCausalLM

    llm = AttnResLlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    llm.model.site = STYLES[contender.style]
    llm.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if contender.compiled:
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

    return generate, lambda: {"graphs": counters["stats"]["unique_graphs"]}


def vllm(contender: Contender, model: str, dtype: str) -> tuple[Generate, State]:
    """vLLM's engine, with our plugin where the contender has an algorithm."""
    from vllm import LLM, SamplingParams

    ours = {"attnres_algorithm": contender.algorithm, "attnres_backend": contender.backend}
    llm = LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=not contender.compiled,
        enable_prefix_caching=False,
        max_model_len=LENGTH,
        max_num_seqs=CONCURRENT,
        max_num_batched_tokens=CONCURRENT * LENGTH,
        additional_config=ours if contender.algorithm else {},
    )

    def generate(requests: Requests) -> list[list[int]]:
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=wanted, **options) for _, wanted in requests]
        inputs = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in done]

    def state() -> dict[str, Any]:
        plugin = "attnres_serve" in sys.modules
        return {
            "plugin_loaded": plugin,
            "backend": llm.collective_rpc("attn_res_backend")[0] if plugin else None,
            "executed": llm.collective_rpc("attn_res_executed")[0] if plugin else {},
        }

    return generate, state


def main(contender: Contender, model: str, dtype: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries write to stdout
    begin = time.perf_counter()
    generate, state = (hugging_face if contender.style else vllm)(contender, model, dtype)
    answers.write(json.dumps(time.perf_counter() - begin) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        tokens = generate(request["requests"]) if request else None
        seconds = time.perf_counter() - begin
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens} if request else state()))
        answers.write("\n")


if __name__ == "__main__":
    main(Contender(**json.loads(sys.argv[1])), *sys.argv[2:])
