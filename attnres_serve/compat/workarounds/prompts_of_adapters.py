"""Log-probabilities of prompts on a server with LoRA adapters, on CPU.

vLLM 0.28 to 0.33 gives the head the mapping from sampled rows to adapters, even when the head
computes all rows of a prompt.  If such a request runs beside others, the engine ends, or the head
applies another request's adapter.  Remove this file for a vLLM whose mapping is that of the rows
which the head computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnres_serve.compat.patch import Patch


def _one_request_at_a_time(original: Any) -> Any:
    """Compute the log-probabilities of prompts for one request at a time, with its adapter."""

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        pending = self.num_prompt_logprobs
        if not pending or self.lora_config is None:
            return original(self, hidden_states, num_scheduled_tokens)
        logprobs: dict[str, Any] = {}
        unfinished: dict[str, int] = {}
        for request_id, logprob_count in list(pending.items()):
            pending.clear()
            pending[request_id] = logprob_count
            manager, request = self.lora_manager._adapter_manager, self.requests[request_id]
            with _all_rows_mapped_to(request, manager):
                logprobs |= original(self, hidden_states, num_scheduled_tokens)
            unfinished |= pending  # which vLLM empties after the last rows of the prompt
        pending.clear()
        pending.update(unfinished)
        return logprobs

    return _get_prompt_logprobs_dict


@contextmanager
def _all_rows_mapped_to(request: Any, manager: Any) -> Iterator[None]:
    """Let the head apply the adapter of one request to all its rows."""
    from vllm.lora.layers import LoRAMapping

    lora, step_mapping = request.lora_request, manager._last_mapping
    adapter_ids = (lora.lora_int_id if lora else 0,)  # one id stands for all rows
    manager.set_adapter_mapping(
        LoRAMapping(step_mapping.index_mapping, adapter_ids, is_prefill=True)
    )
    yield
    manager.set_adapter_mapping(step_mapping)


PATCH = Patch(
    targets=("vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",),
    make=_one_request_at_a_time,
    why="`prompt_logprobs` beside other requests ended the engine",
    models="AttnRes models on CPU with `--enable-lora`",
    first=(0, 28),
    report="prompt-logprobs-with-lora-on-cpu",
)
