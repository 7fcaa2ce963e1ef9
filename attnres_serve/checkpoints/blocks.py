"""Blocks of the KV cache on a CPU, and checks of flags that vLLM would refuse only at its start."""

import math
from typing import Any

from attnres_serve.checkpoints import needs
from attnres_serve.compat import device, source
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Family
from attnres_serve.formats.parsed_config import ParsedConfig

SIZE, COUNT = "--block-size", "--num-gpu-blocks-override"
USUAL = 128  # tokens of a block, unless the flag says otherwise
LATENT = 16  # of latent attention without AMX; vLLM ignores the flag
HELD_BACK = 1  # block that vLLM never fills


def check(name: str, parsed: ParsedConfig, arguments: Arguments) -> None:
    """Refuse a size or a number of blocks with which vLLM cannot serve a whole context on a CPU.

    Args:
        name: the checkpoint's name, for messages.
        parsed: the parsed config.json.
        arguments: of vLLM's server.

    Raises:
        SettingError: one sentence with the flag and its valid values.
    """
    family, config = FAMILIES[parsed.family], parsed.config
    if not device.is_cpu() or not family.cache_elements(config):
        return
    step, requested = source.block_step() or 1, arguments.block_size
    takes_any = family.is_latent or family.state_bytes(config, 2)  # vLLM replaces the size
    if requested is not None and (requested < 1 or (requested % step and not takes_any)):
        most = max(requested // step, 1) * step
        raise SettingError(
            f"{SIZE} is {requested}; vLLM's attention on CPU takes multiples of {step}, such as "
            f"{most} or {USUAL}, the default."
        )
    count, length = arguments.num_gpu_blocks_override, arguments.max_model_len
    if count is None:
        return
    is_fitted = length is not None and length < 1  # vLLM takes the longest fitting context
    if is_fitted or arguments.has(*needs.CONTEXT_FLAGS):
        return
    context = length or needs.context(config)
    fills = is_filled_by_tokens(family, config)
    size = size_of(family, arguments)
    least = math.ceil(context / size if fills else 1) + HELD_BACK
    if count < least:
        what = f"a sequence of {context} tokens in blocks of {size}" if fills else "a sequence"
        shorter = (count - HELD_BACK) * size
        raise SettingError(
            f"{COUNT} is {count}, and {name} needs at least {least}, for {what} and one that vLLM "
            f"holds back; leave it out, give {least} or more"
            f"{f', or --max-model-len {shorter} or less' if fills and shorter > 0 else ''}."
        )


def size_of(family: Family, arguments: Arguments) -> int:
    """Tokens of a block."""
    if family.is_latent and not source.has_amx():
        return LATENT
    return arguments.block_size or USUAL


def is_filled_by_tokens(family: Family, config: Any) -> bool:
    """Whether every layer needs one cache slot for each token of a sequence.

    vLLM counts blocks of recurrent states and windows differently.
    """
    return not family.state_bytes(config, 2) and not has_windows(family, config)


def has_windows(family: Family, config: Any) -> bool:
    """Whether layers may cache fewer tokens than the context."""
    if family.window is not None:
        return family.window(config) is not None
    if not config.get("use_sliding_window", True):
        return False
    read = {"sliding_window", "attention_chunk_size"} & {*family.keys()}
    return any(config.get(key, True) is not None for key in read)
