"""Room for what a later stage of an eager pipeline receives on CPU."""

import pytest
import torch

from attnres_serve.compat.workarounds import eager_stages

pytest.importorskip("vllm")

from tests.compat.faults.eager_stages import receive


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_a_stage_has_room_for_what_it_receives(tokens, monkeypatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    name = "sync_and_gather_intermediate_tensors"
    monkeypatch.setattr(CPUModelRunner, name, getattr(CPUModelRunner, name), raising=False)
    eager_stages.PATCH.apply()
    eager_stages.PATCH.apply()
    sent, result = receive(tokens)
    assert torch.equal(sent, result)
