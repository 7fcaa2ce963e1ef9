"""The formats on Qwen3 and Llama that keep their names: house checkpoints written otherwise."""

import json
import math
from pathlib import Path

from facts import FACTS
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.house import write_house, write_standard
from checkpoints.tensors import renamed, write

_MODE_NAMES = {
    ".self_attention_res_": ".attn_res_",
    "model.output_attn_res_": "model.final_res_",
}
_TITAN_NAMES = _MODE_NAMES | {"model.output_attn_res_": "model.final_attn_res_"}


def as_format(
    folder: Path, config: dict, names: dict[str, str], tensors: dict[str, Tensor] | None = None
) -> Path:
    """The house checkpoint in `folder` with other tensor names and other keys of its config.

    `tensors` stand in the place of its own.
    """
    own = json.loads((folder / "config.json").read_text())
    del own["attn_res"]
    tensors = renamed(tensors or load_file(folder / "model.safetensors"), names)
    return write(folder, own | config, tensors, own["dtype"])


def write_kimi_names(
    folder: str | Path, *, block_layers: int | None, output_route: bool = True, **options
) -> Path:
    """A `qwen3_ar` checkpoint; `block_layers` None has ordinary residuals. Returns its folder."""
    config = {
        "architectures": ["Qwen3ARForCausalLM"],
        "model_type": "qwen3_ar",
        "attn_res_block_size": block_layers,
        "attn_res_output_route": output_route,
        "auto_map": {"AutoConfig": "configuration_qwen3_ar.Qwen3ARConfig"},
    }
    folder = Path(folder)
    if block_layers is None:
        write_standard(folder, "qwen3", **options)
        own = json.loads((folder / "config.json").read_text())
        return write(folder, own | config, load_file(folder / "model.safetensors"), own["dtype"])
    write_house(folder, "qwen3", block_size=2 * block_layers, final_mix=output_route, **options)
    return as_format(folder, config, {})


def write_mode(
    folder: str | Path,
    base: str = "qwen3",
    *,
    mode: str = "block",
    num_blocks: int = 2,
    cumulative: bool = False,
    layers: int = 3,
    **options,
) -> Path:
    """A `qwen3_attnres` or `llama_attnres` checkpoint. Returns its folder.

    `cumulative` is open-attnres, with recency biases; otherwise it is delta-attnres.
    """
    own_key = {"attnres_recency_bias_init": 3.0} if cumulative else {"attnres_num_heads": 8}
    config = {
        "architectures": [f"{FACTS[base].title}AttnResForCausalLM"],
        "model_type": f"{base}_attnres",
        "attnres_gate_type": "bias",
        "attnres_mode": mode,
        "attnres_num_blocks": num_blocks,
        **own_key,
    }
    if not cumulative:
        config["attnres_use_null_source"] = False
    size = 1 if mode == "full" else 2 * math.ceil(layers / num_blocks)
    spec = {"cumulative": True, "recency_bias": True, "final_mix": False} if cumulative else {}
    folder = Path(folder)
    write_house(folder, base, block_size=size, attn_res=spec, layers=layers, **options)
    return as_format(folder, config, _MODE_NAMES)


def write_titan(folder: str | Path, *, num_blocks: int = 2, layers: int = 3, **options) -> Path:
    """A `Qwen3BlockAttnResForCausalLM` checkpoint. Returns its folder."""
    config = {
        "architectures": ["Qwen3BlockAttnResForCausalLM"],
        "model_type": "qwen3",
        "attn_res_num_blocks": num_blocks,
    }
    size = 2 * max(layers // num_blocks, 1)
    folder = Path(folder)
    write_house(folder, "qwen3", block_size=size, layers=layers, **options)
    return as_format(folder, config, _TITAN_NAMES)
