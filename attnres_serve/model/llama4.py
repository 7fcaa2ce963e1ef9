"""vLLM's Llama 4, text alone, with the temperature of attention that config.json states.

vLLM's own class turns it on by the length of the context that is served, unless
generation_config.json says otherwise; Hugging Face's goes by config.json, true where it is silent.
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
