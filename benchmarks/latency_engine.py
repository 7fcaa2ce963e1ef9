"""One engine of ``benchmarks.latency``, in a process of its own.

The only argument is the JSON of ``vllm.LLM``'s options.  The engine runs inside this process, so
that nothing spins between two requests and what is imported here is imported in the engine.  Every
line on stdin is a request in JSON, every line on stdout its answer; the end of stdin ends it.
"""

import json
import os
import sys
import time
from typing import Any


def main(options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    import torch
    from vllm import LLM, SamplingParams

    def generate(prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds until every prompt has ``max_tokens`` greedy tokens."""
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if any(len(request.outputs[0].token_ids) != max_tokens for request in outputs):
            raise RuntimeError("a request ended early")
        return seconds

    def state() -> dict[str, Any]:
        """What runs here."""
        plugin = "attnres_serve" in sys.modules
        return {
            "plugin_loaded": plugin,
            "architecture": llm.llm_engine.model_config.architecture,
            "compilation": llm.llm_engine.vllm_config.compilation_config.mode.name,
            "threads": torch.get_num_threads(),
            "executed": llm.collective_rpc("attn_res_executed")[0] if plugin else {},
        }

    begin = time.perf_counter()
    llm = LLM(**options)
    answers.write(json.dumps(time.perf_counter() - begin) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(generate(**request) if request else state()) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
