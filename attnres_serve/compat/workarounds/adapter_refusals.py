"""Refusals of LoRA adapters over HTTP, as errors of the client.

vLLM 0.32 answers a file that it cannot load with status 500 and a sentence within two others, and
its engine logs a traceback.  Here the files are checked before the engine is called, and a refusal
of the workers is answered with its sentence.

Remove this with a vLLM whose ``OpenAIServingModels.load_lora_adapter`` answers both with 400.
"""

import asyncio
from pathlib import Path
from typing import Any

from attnres_serve.compat import engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.families import BY_ARCHITECTURE
from attnres_serve.lora import files, refusals


def _in_a_sentence(original: Any) -> Any:
    """Refuse adapters of AttnRes models with 400 and one sentence."""
    from vllm.entrypoints.openai.models import serving

    async def load_lora_adapter(self, request, base_model_name=None):
        config, name = self.engine_client.vllm_config, request.lora_name
        reason = await asyncio.to_thread(_problem, config, name, request.lora_path)
        if reason is None:
            answer = await original(self, request, base_model_name)
            if isinstance(answer, str):  # it was loaded
                return answer
            reason = refusals.refusal_in(answer.error.message, name)
            if reason is None:
                return answer
        return serving.create_error_response(reason[0].upper() + reason[1:])

    return load_lora_adapter


def _problem(vllm_config: Any, name: str, place: str) -> str | None:
    """The sentence that refuses an adapter by its files; None if the engine decides."""
    config, folder = vllm_config.model_config.hf_config, Path(place).expanduser()
    if not engine_config.has_attn_res(vllm_config):
        return None
    if vllm_config.lora_config is None:
        return f"{refusals.name_of(name)} needs a server that was started with --enable-lora."
    if not folder.is_dir():  # a model id, or missing, which vLLM reports
        return None
    (architecture,) = config.architectures
    model = files.Model(
        weight_shapes=BY_ARCHITECTURE[architecture].shapes(config.attn_res_config),
        max_rank=vllm_config.lora_config.max_lora_rank,
        has_table=lambda *_: True,  # the workers have the table
        dtype=vllm_config.lora_config.lora_dtype,
    )
    problem = files.problem(folder, model)
    return problem and f"{refusals.name_of(name)} {problem}"


PATCH = Patch(
    targets=("vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter",),
    make=_in_a_sentence,
    why="a refused adapter was answered with 500",
    models="AttnRes models in `attnres-serve`",
    first=(0, 28),
)
