"""As much of a configuration of vLLM's as is read before a worker starts."""

from types import SimpleNamespace
from typing import Any

import torch
from facts import TINY


def vllm_config(model: object = "some/model", **changes: Any) -> SimpleNamespace:
    """Of a Llama in FLA's format, with attributes of their own."""
    values: dict[str, Any] = {
        "additional_config": {},
        "speculative_config": None,
        "num_speculative_tokens": 0,
        "load_config": SimpleNamespace(load_format="auto"),
        "parallel_config": SimpleNamespace(
            worker_extension_cls="",
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            distributed_executor_backend="mp",
            use_sequence_parallel_moe=False,
            enable_expert_parallel=False,
        ),
        "lora_config": None,
        "kv_transfer_config": None,
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=False),
        "cache_config": SimpleNamespace(enable_prefix_caching=False, kv_offloading_size=None),
        "model_config": SimpleNamespace(
            model=str(model),
            revision="v2",
            tokenizer=str(model),
            tokenizer_revision=None,
            tokenizer_mode="auto",
            trust_remote_code=False,
            skip_tokenizer_init=False,
            runner_type="generate",
            dtype=torch.bfloat16,
            use_mla=False,
            enforce_eager=False,
            is_hybrid=True,
            hf_text_config=SimpleNamespace(num_hidden_layers=4),
            hf_config=SimpleNamespace(
                attn_res_format="fla",
                attn_res_config=TINY["llama"] | {"vocab_size": 320},
                architectures=["AttnResLlamaForCausalLM"],
            ),
        ),
    }
    return SimpleNamespace(**values | changes)
