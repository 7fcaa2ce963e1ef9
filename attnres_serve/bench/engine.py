"""One engine of ``attnres-serve bench``, in a separate process.

It is run as a script and imports nothing of attnres-serve, so that the baseline is stock vLLM only.
Its arguments are the flags of vLLM's engine.  Every line on stdin is a request in JSON, every line
on stdout its response; the end of stdin ends it.  The engine runs inside this process, so nothing
spins between two requests, and steps are timed in the process that runs them.
"""

import gc
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

COUNTERS = "vllm:spec_decode_num_"
COMPILED_CODE = Path(__file__).parents[1] / "compat" / "workarounds" / "compiled_code.py"


class Bench:
    """An engine that measures its steps.

    Args:
        flags: the flags of vLLM's engine.
    """

    def __init__(self, flags: list[str]) -> None:
        from vllm import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        # Stock vLLM, too, has to load code that an earlier start compiled: loaded code may be
        # slower than code compiled in the same process, so only the first start would compare
        # equals.
        runpy.run_path(str(COMPILED_CODE))["accept"]()
        args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
        self.engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        self.number = 0
        gc.freeze()  # the garbage collector skips objects of the start between two steps

    def begin(self, prompts: list[list[int]], max_tokens: int) -> dict[str, list[float]]:
        """Run prompts together, greedily, until every one has its first token.

        Unfinished prompts of an earlier call are finished before: vLLM delays a prompt without room
        in the KV cache, so it may need more steps than tokens.

        Args:
            prompts: token ids.
            max_tokens: number of tokens to generate for each; end-of-sequence tokens are ignored.

        Returns:
            ``first``: for each prompt the seconds from the call to its first token.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.decode()
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        gc.collect()
        first: dict[str, float] = {}
        with uncollected():
            begin = time.perf_counter()
            for prompt in prompts:
                self.number += 1
                request = {"prompt_token_ids": prompt}
                self.engine.add_request(str(self.number), request, params.clone())
            while len(first) < len(prompts):
                outputs = self.engine.step()
                seconds = time.perf_counter() - begin
                for output in outputs:
                    first.setdefault(output.request_id, seconds)
        return {"first": list(first.values())}

    def decode(self, most: int | None = None) -> dict[str, list[Any]]:
        """Continue the prompts of ``begin``.

        Args:
            most: the number of steps, after which another engine may continue; None for all
                remaining steps.

        Returns:
            ``steps``: the seconds of each step; ``tokens``: for each step the number of tokens of
            every running prompt.
        """
        steps: list[float] = []
        tokens: list[list[int]] = []
        with uncollected():
            last = time.perf_counter()
            while len(steps) != most and self.engine.has_unfinished_requests():
                outputs = self.engine.step()
                if outputs:
                    now = time.perf_counter()
                    steps.append(now - last)
                    tokens.append([len(one.outputs[0].token_ids) for one in outputs])
                    last = now
        return {"steps": steps, "tokens": tokens}

    def drop(self) -> None:
        """Abort the prompts of ``begin``."""
        self.engine.abort_request([*self.engine.output_processor.request_states], internal=True)

    def _drafted(self) -> dict[str, Any]:
        """vLLM's counters of drafts and of their tokens; empty for an engine without drafts."""
        metrics = self.engine.get_metrics() if self.engine.log_stats else []
        counters = {metric.name.removeprefix(COUNTERS): metric for metric in metrics}
        return {
            name: metric.values if hasattr(metric, "values") else metric.value
            for name, metric in counters.items()
            if name != metric.name
        }

    def _saved_s(self) -> float:
        """The seconds of compiling that a later start of this engine does not need."""
        from vllm import envs
        from vllm.compilation.counter import compilation_counter
        from vllm.platforms import current_platform

        config = self.engine.vllm_config
        has_workers = config.parallel_config.world_size > 1
        if (
            compilation_counter.num_aot_artifacts_loaded
            or envs.VLLM_DISABLE_COMPILE_CACHE
            or (has_workers and current_platform.is_cpu())  # which compile anew, see COMPILED_CODE
        ):
            return 0.0
        return config.compilation_config.compilation_time

    def facts(self) -> dict[str, Any]:
        """Facts about the running engine; those of ``alike`` have to be equal in all engines."""
        from vllm.compilation.counter import compilation_counter
        from vllm.platforms import current_platform

        config = self.engine.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        ours = "attnres_serve.plugin" in sys.modules
        # Some classes are never compiled; models in other processes are not visible here.
        seen = config.parallel_config.world_size > 1 or compilation_counter.num_models_seen > 0
        compiled = config.compilation_config.mode.name != "NONE" and seen
        dtype = str(model.dtype).removeprefix("torch.")
        ask = self.engine.collective_rpc
        return {
            "gpu": None if current_platform.is_cpu() else current_platform.get_device_name(),
            "architecture": model.architecture,
            "plugin_loaded": ours,
            "compiled": compiled,
            "dtype": dtype,
            "vocabulary": model.get_vocab_size(),
            "executed": ask("attn_res_executed")[0] if ours else {},
            "backend": ask("attn_res_backend")[0] if ours else None,
            "algorithm": ask("attn_res_algorithm")[0] if ours else None,
            "drafted": self._drafted(),
            "saved_s": self._saved_s(),
            "alike": {
                "dtype": dtype,
                "compiled": compiled,
                "code_loaded": compilation_counter.num_aot_artifacts_loaded > 0,
                "cuda_graphs": str(config.compilation_config.cudagraph_mode),
                "async_scheduling": bool(scheduler.async_scheduling),
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "threads": torch.get_num_threads(),
            },
        }


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's garbage collector, whose time would count as a step's."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _call(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return method(**arguments)


def main(flags: list[str]) -> None:
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    bench = Bench(flags)
    # Allocates one large frame chunk before all calls, like the workaround ``python_frames``:
    # without it, a model's time varies by a tenth with the position of CPython's chunk ends.
    _call.__code__ = _call.__code__.replace(co_stacksize=1 << 15)
    responses.write(json.dumps(bench.facts()) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        response = _call(getattr(bench, request.pop("what")), request)
        responses.write(json.dumps(response) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        from attnres_serve.start import failures  # after the measurement

        failures.tell(error)
        raise
