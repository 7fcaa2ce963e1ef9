"""One engine of ``attnres-serve bench``, in a process of its own.

It is run as a script and imports nothing of ours, so that the baseline is stock vLLM and nothing
else.  Its arguments are the flags of vLLM's engine.  Every line on stdin is a request in JSON,
every line on stdout its answer; the end of stdin ends it.  The engine runs inside this process, so
nothing spins between two requests, and a step is timed where it is taken.
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
    """An engine that is asked for timings.

    Args:
        flags: of vLLM's engine.
    """

    def __init__(self, flags: list[str]) -> None:
        from vllm import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        # Stock vLLM, too, is to load what an earlier start compiled: such code need not be as fast
        # as code of the same process, and only the first start would compare like with like.
        runpy.run_path(str(COMPILED_CODE))["accept"]()
        args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
        self.engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        self.number = 0
        gc.freeze()  # what the start left is not to be looked through between two steps

    def begin(self, prompts: list[list[int]], max_tokens: int) -> dict[str, list[float]]:
        """Run prompts together, greedily, until every one has its first token.

        Those of an earlier call that are not done run to their end before: vLLM puts a prompt off
        that finds no room in the KV cache, so that it needs more steps than tokens.

        Args:
            prompts: token ids.
            max_tokens: of each answer; the end of a sequence is ignored.

        Returns:
            ``first``, seconds from the call to the first token, per prompt.
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
        """Go on with the prompts of ``begin``.

        Args:
            most: steps, after which another engine may be asked before this one goes on; None for
                all that are left.

        Returns:
            ``steps``, seconds of each step of the engine; and ``given``, how many tokens each of
            them gave to every prompt that ran.
        """
        steps: list[float] = []
        given: list[list[int]] = []
        with uncollected():
            last = time.perf_counter()
            while len(steps) != most and self.engine.has_unfinished_requests():
                outputs = self.engine.step()
                if outputs:
                    now = time.perf_counter()
                    steps.append(now - last)
                    given.append([len(one.outputs[0].token_ids) for one in outputs])
                    last = now
        return {"steps": steps, "given": given}

    def drop(self) -> None:
        """End the prompts of ``begin`` where they are."""
        self.engine.abort_request([*self.engine.output_processor.request_states], internal=True)

    def _drafted(self) -> dict[str, Any]:
        """vLLM's counters of drafts and of their tokens; empty for an engine without drafts."""
        found = self.engine.get_metrics() if self.engine.log_stats else []
        counters = {metric.name.removeprefix(COUNTERS): metric for metric in found}
        return {
            name: metric.values if hasattr(metric, "values") else metric.value
            for name, metric in counters.items()
            if name != metric.name
        }

    def facts(self) -> dict[str, Any]:
        """Facts about the engine that runs here; those of ``alike`` are to be others' too."""
        from vllm.compilation.counter import compilation_counter
        from vllm.platforms import current_platform

        config = self.engine.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        ours = "attnres_serve.plugin" in sys.modules
        # Some classes are never compiled; those of other processes are not seen from here.
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
    """Python's garbage collector waits: it would make one step a model's that is not."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _call(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return method(**arguments)


def main(flags: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    bench = Bench(flags)
    # Room for the frames of all that an answer calls, as the workaround ``python_frames`` makes it:
    # without it a model's time depends by a tenth on where a chunk of CPython's ends.
    _call.__code__ = _call.__code__.replace(co_stacksize=1 << 15)
    answers.write(json.dumps(bench.facts()) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = _call(getattr(bench, request.pop("what")), request)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        from attnres_serve.start import failures  # nothing is measured any more

        failures.tell(error)
        raise
