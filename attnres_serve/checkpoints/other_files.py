"""Weights of a folder that are not those of its safetensors files, and sentences on them."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# Weights in unsupported files.
OTHER_KINDS = {
    "*.gguf": "a GGUF file, for llama.cpp, which is not read here; give the safetensors of the "
    "model that it was made of, which the page of a GGUF repository names as its base model.",
    "*.distcp": "a shard of torch.distributed.checkpoint (FSDP); merge them where the model was "
    "trained (`accelerate merge-weights`) and save safetensors.",
    "pytorch_model_fsdp_*": "a folder of FSDP's; merge its shards with `accelerate merge-weights`.",
    "global_step*": "a folder of DeepSpeed's; merge its shards with the zero_to_fp32.py beside it.",
    "zero_to_fp32.py": "DeepSpeed's script; run it to merge the shards into weights.",
}
# Files of trainers beside the weights.
_NOT_WEIGHTS = re.compile(r"training_args|trainer_state|optimizer|scheduler|scaler|rng_state")


def pickles(folder: Path) -> list[Path]:
    """The pickles of a folder that may hold weights."""
    candidates = (path for path in folder.iterdir() if path.suffix in PICKLES)
    return sorted(path for path in candidates if not _NOT_WEIGHTS.match(path.name))


def of_an_adapter(path: Path, beside: bool) -> str:
    """A sentence on a LoRA adapter that was given as a model.

    Args:
        path: of a file of the adapter.
        beside: whether there are other safetensors files beside it.
    """
    way = f"serve it with `--enable-lora --lora-modules NAME={shlex.quote(str(path.parent))}`"
    if beside:
        return (
            f"{path} is an adapter beside the weights, which vLLM would read as weights; move it "
            f"and {ADAPTER_CONFIG} to a folder of their own, and name that to --lora-modules."
        )
    return (
        f"{path} is of a LoRA adapter and no model; give the model that it was trained on, and "
        f"{way}."
    )


def other_kind(paths: Iterable[Path]) -> str:
    """A sentence on unsupported weights among some files; empty without any."""
    ordered = sorted(paths)
    for pattern, kind in OTHER_KINDS.items():
        if match := next((path for path in ordered if path.match(pattern)), None):
            return f" {match.name} is {kind}"
    return ""
