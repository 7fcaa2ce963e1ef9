"""docs/build/upstream/seeds-of-chunks-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import numpy
import torch


def fault() -> bool:
    """The generator of a chunk that is not the last is asked for an offset, which it has not."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    batch = SimpleNamespace(num_reqs=1, generators={0: torch.Generator()}, req_ids=["name"])
    runner: Any = SimpleNamespace(
        use_async_scheduling=False,
        input_batch=batch,
        discard_request_mask=SimpleNamespace(np=numpy.ones(1, dtype=bool)),
    )
    sample: Any = None
    try:
        CPUModelRunner._bookkeeping_sync(runner, sample, sample, sample, sample, 0)
    except RuntimeError as error:
        return "offset" in str(error)
    except AttributeError:  # it came to the sample
        pass
    return False
