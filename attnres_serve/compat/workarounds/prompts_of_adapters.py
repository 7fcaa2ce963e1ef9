"""Log-probabilities of prompts on a server with LoRA adapters, on CPU.

vLLM 0.28 to 0.33: the head maps rows to adapters by the sampled rows, even if it gets all rows of a
prompt.  A request beside others then ends the engine, or uses another request's adapter in the
head. Remove this with a vLLM that gives the head the mapping of its rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnres_serve.compat.patch import Patch


def _telling_whose_rows(original: Any) -> Any:
    """Compute them for one request at a time, with its adapter."""

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        pending = self.num_prompt_logprobs
        if not pending or self.lora_config is None:
            return original(self, hidden_states, num_scheduled_tokens)
        logprobs: dict[str, Any] = {}
        unfinished: dict[str, int] = {}
        for name, count in list(pending.items()):
            pending.clear()
            pending[name] = count
            with _rows_of(self.lora_manager._adapter_manager, self.requests[name]):
                logprobs |= original(self, hidden_states, num_scheduled_tokens)
            unfinished |= pending  # empty after the last rows of its prompt
        pending.clear()
        pending.update(unfinished)
        return logprobs

    return _get_prompt_logprobs_dict


@contextmanager
def _rows_of(manager: Any, request: Any) -> Iterator[None]:
    """Map all rows of the head to one request."""
    from vllm.lora.layers import LoRAMapping

    lora, of_step = request.lora_request, manager._last_mapping
    numbers = (lora.lora_int_id if lora else 0,)  # one number for all rows
    manager.set_adapter_mapping(LoRAMapping(of_step.index_mapping, numbers, is_prefill=True))
    yield
    manager.set_adapter_mapping(of_step)


PATCH = Patch(
    targets=("vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",),
    make=_telling_whose_rows,
    why="`prompt_logprobs` beside other requests ended the engine",
    models="AttnRes models on CPU with `--enable-lora`",
    first=(0, 28),
    report="prompt-logprobs-with-lora-on-cpu",
)
