"""Rows of a batch without a LoRA adapter, with one of several, and of prompts, on CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnres_serve.compat.workarounds import prompts_of_adapters, rows_without_adapter

pytest.importorskip("vllm")

from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.compat.faults.rows_without_adapter import (
    OF_SLOTS,
    RANK,
    SLOTS,
    TOKENS,
    WIDTH,
    wrapper,
)


@pytest.fixture(autouse=True)
def functions_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(module, name, getattr(module, name))
    rows_without_adapter.PATCH.apply()
    rows_without_adapter.PATCH.apply()


BATCHES = [(0, 7), (9, 0, 0, 7), (0, 0), (9, 9), (7, 0, 9, 0, 7), (0, 9)]


@pytest.mark.parametrize("ids", BATCHES)
@pytest.mark.parametrize("part", ["linear", "logits", "embedding"])
def test_each_row_gets_its_own_adapter_or_none(part: str, ids: tuple[int, ...]) -> None:
    x, y = torch.randn(len(ids), WIDTH), torch.randn(len(ids), TOKENS)
    down, up = torch.randn(SLOTS, 1, RANK, WIDTH), torch.randn(SLOTS, 1, TOKENS, RANK)
    rows = wrapper(ids)
    result = y.clone()
    if part == "linear":
        rows.add_lora_linear(result, x, (down,), (up,), 1.0, (TOKENS,))
    elif part == "logits":
        rows.add_lora_logits(result, x, down, up, 1.0)
    else:
        rows.add_lora_embedding(result, x[:, :RANK], up)
    for row, number in enumerate(ids):
        if number:
            slot = OF_SLOTS.index(number)
            low = x[row, :RANK] if part == "embedding" else down[slot, 0] @ x[row]
            torch.testing.assert_close(result[row], y[row] + up[slot, 0] @ low)
        else:
            assert result[row].equal(y[row])


# --- prompts whose logprobs are asked for


def test_a_prompts_rows_have_its_own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is sampled in the step; what is sampled then has its own again."""
    of_step = LoRAMapping((7, 7, 7, 0, 0, 9), (7, 0, 9), is_prefill=True)
    asked_for: dict[str, tuple[int, ...]] = {}
    manager = SimpleNamespace(_last_mapping=of_step)
    manager.set_adapter_mapping = lambda mapping: setattr(manager, "_last_mapping", mapping)

    def of_vllm(self: Any, hidden_states: Any, num_scheduled_tokens: Any) -> dict[str, str]:
        (name,) = self.num_prompt_logprobs
        asked_for[name] = manager._last_mapping.prompt_mapping
        if name == "chunked":
            return {}
        del self.num_prompt_logprobs[name]
        return {name: "its logprobs"}

    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", of_vllm)
    prompts_of_adapters.PATCH.apply()
    prompts_of_adapters.PATCH.apply()
    tuned = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=9))
    runner: Any = SimpleNamespace(
        num_prompt_logprobs={"tuned": 0, "chunked": 3, "plain": 1},
        lora_config=object(),
        lora_manager=SimpleNamespace(_adapter_manager=manager),
        requests={"tuned": tuned, "chunked": tuned, "plain": SimpleNamespace(lora_request=None)},
    )
    result = GPUModelRunner._get_prompt_logprobs_dict(runner, torch.zeros(6, 1), {})
    assert asked_for == {"tuned": (9,), "chunked": (9,), "plain": (0,)}
    assert set(result) == {"tuned", "plain"}
    assert runner.num_prompt_logprobs == {"chunked": 3}
    assert manager._last_mapping is of_step


def test_one_number_stands_for_all_rows() -> None:
    """The head is told of a prompt's rows by one."""
    x, y = torch.randn(5, WIDTH), torch.randn(5, TOKENS)
    down, up = torch.randn(SLOTS, 1, RANK, WIDTH), torch.randn(SLOTS, 1, TOKENS, RANK)
    for number in (9, 0):
        actual, rows = y.clone(), wrapper((number,))
        rows.add_lora_logits(actual, x, down, up, 1.0)
        expected = y + x @ down[1, 0].T @ up[1, 0].T if number else y
        torch.testing.assert_close(actual, expected)
