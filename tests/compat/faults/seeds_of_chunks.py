"""docs/build/upstream/seeds-of-chunks-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import numpy
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Runner:
    """A runner that does its bookkeeping within ``sample_tokens``, of a chunk that is discarded."""

    execute_model_state = None  # so that vLLM samples nothing, and looks for a connector's output
    use_async_scheduling = False

    def __init__(self) -> None:
        generators = {0: torch.Generator()}
        self.input_batch = SimpleNamespace(num_reqs=1, generators=generators, req_ids=["name"])
        self.discard_request_mask = SimpleNamespace(np=numpy.ones(1, dtype=bool))

    @property
    def kv_connector_output(self) -> Any:
        sample: Any = None
        runner: Any = self
        return GPUModelRunner._bookkeeping_sync(runner, sample, sample, sample, sample, 0)


def fault() -> bool:
    """The generator of a chunk that is not the last is asked for an offset, which it has not."""
    runner: Any = Runner()
    try:
        GPUModelRunner.sample_tokens(runner, None)
    except RuntimeError as error:
        return "offset" in str(error)
    except AttributeError:  # the bookkeeping came to the sample, of which there is none
        pass
    return False
