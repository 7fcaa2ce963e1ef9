"""Checkpoints of AliceAI's own format."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from checkpoints.house import write_house
from checkpoints.tensors import write

NAMES = (
    (r"output_attn_res_proj", "attnres_final.res_proj"),
    (r"output_attn_res_norm\.weight", "attnres_final.res_norm_weight"),
    (r"self_attention_res_proj", "attn_res_proj"),
    (r"self_attention_res_norm\.weight", "attn_res_norm_weight"),
    (r"mlp_res_norm\.weight", "mlp_res_norm_weight"),
    (r"linear_attn\.A_log", "linear_attn.a_log_bias"),
)


def write_alice_ai(folder: Path, layers: int, per_block: int, **options: Any) -> Path:
    """A random one with blocks of so many layers; `options` are of `write_house`."""
    write_house(folder, "alice_ai", layers=layers, block_size=2 * per_block, **options)
    config = json.loads((folder / "config.json").read_text())
    del config["attn_res"]
    config |= {"model_type": "alice_ai", "architectures": ["AliceAIForCausalLM"]}
    config["block_attn_res_block_size"] = per_block
    tensors = load_file(folder / "model.safetensors")
    for old, new in NAMES:
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    for leaf in ("proj.weight", "norm_weight"):  # the first site reads the embedding alone
        del tensors[f"model.layers.0.attn_res_{leaf}"]
    return write(folder, config, tensors, config["dtype"])
