"""Rows of a batch without a LoRA adapter, and with one of several, on CPU."""

import pytest
import torch

from attnres_serve.compat.workarounds import rows_without_adapter

pytest.importorskip("vllm")

from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

WIDTH, RANK, TOKENS, SLOTS = 6, 3, 8, 2
OF_SLOTS = [7, 9]  # the ids of the adapters in the slots


@pytest.fixture(autouse=True)
def functions_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(module, name, getattr(module, name))
    rows_without_adapter.leave_as_they_are()
    rows_without_adapter.leave_as_they_are()


def wrapper(ids: tuple[int, ...]) -> punica_cpu.PunicaWrapperCPU:
    """vLLM's, for rows with the adapters of these ids; 0 is none."""
    found = punica_cpu.PunicaWrapperCPU(64, 64, "cpu")
    found.update_metadata(LoRAMapping(ids, ids, is_prefill=True), OF_SLOTS, SLOTS + 1, TOKENS)
    return found


BATCHES = [(0, 7), (9, 0, 0, 7), (0, 0), (9, 9), (7, 0, 9, 0, 7), (0, 9)]


@pytest.mark.parametrize("ids", BATCHES)
@pytest.mark.parametrize("part", ["linear", "logits", "embedding"])
def test_each_row_gets_its_own_adapter_or_none(part: str, ids: tuple[int, ...]) -> None:
    x, y = torch.randn(len(ids), WIDTH), torch.randn(len(ids), TOKENS)
    down, up = torch.randn(SLOTS, 1, RANK, WIDTH), torch.randn(SLOTS, 1, TOKENS, RANK)
    rows = wrapper(ids)
    found = y.clone()
    if part == "linear":
        rows.add_lora_linear(found, x, (down,), (up,), 1.0, (TOKENS,))
    elif part == "logits":
        rows.add_lora_logits(found, x, down, up, 1.0)
    else:
        rows.add_lora_embedding(found, x[:, :RANK], up)
    for row, number in enumerate(ids):
        if number:
            slot = OF_SLOTS.index(number)
            low = x[row, :RANK] if part == "embedding" else down[slot, 0] @ x[row]
            torch.testing.assert_close(found[row], y[row] + up[slot, 0] @ low)
        else:
            assert found[row].equal(y[row])
