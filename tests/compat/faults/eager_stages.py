"""docs/build/upstream/eager-pipelines-on-cpu.md"""

from types import SimpleNamespace
from typing import Any

import torch


def fault() -> bool:
    """A stage without a dummy run has no room for what it receives."""
    try:
        return not all(sent.equal(found) for sent, found in map(receive, (1, 5, 8)))
    except AssertionError:
        return True


def receive(tokens: int) -> tuple[Any, Any]:
    """What a stage without a dummy run computes on, of what it was sent."""
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = SimpleNamespace(
        intermediate_tensors=None,
        max_num_tokens=8,
        model_config=SimpleNamespace(dtype=torch.float32),
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        ),
        device=torch.device("cpu"),
        model=SimpleNamespace(
            make_empty_intermediate_tensors=lambda batch_size, dtype, device: IntermediateTensors(
                {"rows": torch.full((batch_size, 3), torch.nan, dtype=dtype, device=device)}
            )
        ),
    )
    sent = IntermediateTensors({"rows": torch.randn(tokens, 3)})
    receive: Any = CPUModelRunner.sync_and_gather_intermediate_tensors
    return sent["rows"], receive(runner, tokens, sent, True)["rows"]
