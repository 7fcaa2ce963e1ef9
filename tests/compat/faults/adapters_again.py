"""Other files under the name of a LoRA adapter."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from attnres_serve.errors import SettingError


def fault() -> bool:
    """An adapter with other files is taken, and the prefix cache has the first one's key for it."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
    from vllm.v1.engine.input_processor import InputProcessor

    config = SimpleNamespace(hf_config=SimpleNamespace(attn_res_config={}))
    processor: Any = SimpleNamespace(
        lora_config=object(), tokenizer=None, vllm_config=SimpleNamespace(model_config=config)
    )
    keys = []
    with TemporaryDirectory() as folder:
        for value in (1.0, 2.0):
            adapter = LoRARequest("mine", 1, str(write(Path(folder), value)))
            try:
                InputProcessor._validate_lora(processor, adapter)
            except SettingError:
                return False
            asked: Any = SimpleNamespace(lora_request=adapter)
            keys.append(_gen_lora_extra_hash_keys(asked))
    return keys[0] == keys[1]


def write(folder: Path, value: float = 1.0, rank: int = 4) -> Path:
    """An adapter; tensors and configuration can be changed one by one, and keep their sizes."""
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((8,), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    return folder
