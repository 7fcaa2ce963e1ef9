"""vLLM's Llama 4, text only, with the temperature tuning of attention that config.json states.

vLLM's class turns it on by the length of the served context, unless generation_config.json states
it.  Hugging Face's class reads config.json, with true as its default.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models import llama4

TEMPERATURE = "attn_temperature_tuning"


class Llama4ForCausalLM(llama4.Llama4ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, **kwargs: Any) -> None:
        model_config = vllm_config.model_config
        stated = bool(getattr(model_config.hf_config, TEMPERATURE))
        model_config.override_generation_config[TEMPERATURE] = stated
        super().__init__(vllm_config=vllm_config, **kwargs)
