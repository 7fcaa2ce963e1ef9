"""Room for what a later stage of an eager pipeline receives on CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnres_serve.compat.workarounds import eager_stages

pytest.importorskip("vllm")


def receive(tokens: int) -> tuple[Any, Any]:
    """What a stage without a dummy run computes on, of what it was sent."""
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = SimpleNamespace(
        intermediate_tensors=None,
        max_num_tokens=8,
        model_config=SimpleNamespace(dtype=torch.float32),
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


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_a_stage_has_room_for_what_it_receives(tokens, monkeypatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    name = "sync_and_gather_intermediate_tensors"
    monkeypatch.setattr(CPUModelRunner, name, getattr(CPUModelRunner, name), raising=False)
    with pytest.raises(AssertionError):
        receive(tokens)
    eager_stages.PATCH.apply()
    eager_stages.PATCH.apply()
    sent, found = receive(tokens)
    assert torch.equal(sent, found)
