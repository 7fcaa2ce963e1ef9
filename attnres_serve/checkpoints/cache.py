"""The size of a server's KV cache on a CPU, computed before its start.

On a GPU vLLM measures the free memory after loading.  On a CPU it would take most of the memory.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnres_serve.checkpoints import blocks, needs
from attnres_serve.compat import device, environment
from attnres_serve.compat.arguments import Arguments
from attnres_serve.compat.workers import workers_of
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.family import Family
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.sentences import BINARY, amount
from attnres_serve.start import memory

VARIABLE = environment.CACHE  # whole GiB for every worker
FLAG = "--kv-cache-memory-bytes"  # the variable has precedence
LEFT_TO_VLLM = ("gpu_memory_utilization", "num_gpu_blocks_override")  # other ways to say it
GIB = 2**30
CONTEXTS = 4  # the cache holds so many sequences of full length,
LEAST = GIB  # and at least so many bytes,
SHARE = 4  # but takes at most one part in 4 of the free memory


@dataclass(frozen=True)
class Cache:
    """The KV cache of a server.

    Attributes:
        size: bytes for every worker.
        workers: the number of workers on this machine.
        tokens: the number of tokens in one engine's cache; an estimate with recurrent layers or
            windows, whose states do not grow with the context.
        is_chosen: whether the size is ours, stated by no variable and no flag.
    """

    size: int
    workers: int
    tokens: int
    is_chosen: bool

    def __str__(self) -> str:
        each = f" for each of {self.workers} workers" if self.workers > 1 else ""
        return f"{amount(self.size, BINARY)}{each}, {self.tokens:,} tokens"


def of(name: str, parsed: ParsedConfig, arguments: Arguments | None = None) -> Cache | None:
    """The cache that a server on this machine will have; None if vLLM measures it.

    Args:
        name: the checkpoint's name, for messages.
        parsed: the parsed config.json.
        arguments: of vLLM's server.

    Raises:
        CheckpointError: it cannot hold one sequence of full length.
        SettingError: a variable or a flag has an impossible value.
    """
    arguments = arguments or Arguments()
    requested = _requested(arguments)
    left_to_vllm = requested is None and arguments.has(*LEFT_TO_VLLM)
    if left_to_vllm or not device.is_cpu():
        return None
    family, config = FAMILIES[parsed.family], parsed.config
    length = arguments.length
    context = length or needs.context(config)
    parallel = workers_of(arguments)
    workers, shares = parallel.count, (parallel.stages, parallel.ranks)
    need = _of_a_context(family, config, context, arguments, shares)
    free = min(memory.left(), workers * memory.left_on_a_node())
    most = free // (SHARE * workers)
    size, setting = requested or (min(max(CONTEXTS * need, LEAST), most), None)
    if setting is not None and size * workers > free:
        raise SettingError(
            f"{setting} takes {amount(size * workers, BINARY)} of memory"
            f"{f' in {workers} workers' if workers > 1 else ''}, and {amount(free, BINARY)} are "
            "free; ask for less."
        )
    kv_cache = Cache(size, workers, size * context // need, setting is None)
    block, least = blocks.size_of(family, arguments), context
    if blocks.is_filled_by_tokens(family, config):
        least = (math.ceil(context / block) + blocks.HELD_BACK) * block
    if kv_cache.tokens < least and not blocks.has_windows(family, config):
        whose = (
            f"--max-model-len {context}" if length else f"{name} with {context} tokens of context"
        )
        need = need * least // context
        raise CheckpointError(_too_small(whose, kv_cache, need, block, free, setting))
    return kv_cache


def _requested(arguments: Arguments) -> tuple[int, str] | None:
    """The size in bytes by the variable or the flag, and its name; None without either."""
    if value := os.environ.get(VARIABLE, "").strip():
        if not value.isdecimal() or not int(value):
            raise SettingError(
                f"{VARIABLE} is {os.environ[VARIABLE]!r}; expected a whole number of GiB from 1 "
                f"on, and {FLAG} takes any number of bytes."
            )
        return int(value) * GIB, f"{VARIABLE}={value}"
    size = arguments.kv_cache_memory_bytes
    if size is not None and size < 1:
        raise SettingError(f"{FLAG} is {size}; expected a number of bytes from 1 on.")
    return None if size is None else (size, f"{FLAG} {size}")


def _of_a_context(
    family: Family,
    config: Mapping[str, Any],
    tokens: int,
    arguments: Arguments,
    shares: tuple[int, int],
) -> int:
    """Bytes of a worker's cache for a sequence of ``tokens``."""
    width = 4 if arguments.dtype in ("float32", "float") else 2
    of_cache = 1 if arguments.kv_cache_dtype.startswith("fp8") else width
    stages, ranks = shares
    layers = config["num_hidden_layers"]
    share = math.ceil(layers / stages) / layers
    # Every rank has all latents, and at least one head.
    heads = 1 if family.is_latent else config.get("num_key_value_heads") or ranks
    of_tokens = tokens * family.cache_elements(config) * of_cache / min(ranks, heads)
    return math.ceil(share * (of_tokens + family.state_bytes(config, width) / ranks)) or 1


def _too_small(
    whose: str, kv_cache: Cache, need: int, block: int, free: int, setting: str | None
) -> str:
    """The sentence for a cache that cannot hold one sequence of full length."""
    each = " in each worker" if kv_cache.workers > 1 else ""
    limit = f"a quarter of the free memory is {amount(kv_cache.size * kv_cache.workers, BINARY)}"
    ways = []
    if shorter := max(kv_cache.tokens // block - blocks.HELD_BACK, 0) * block:
        ways.append(f"give `serve` --max-model-len {shorter} or less")
    if (larger := math.ceil(need / GIB)) * GIB * kv_cache.workers <= free:
        ways.append(f"set {VARIABLE}={larger} (GiB)")
    return (
        f"{whose} needs {amount(need, BINARY)} of KV cache{each}, and "
        f"{limit if setting is None else f'{setting} allows {amount(kv_cache.size, BINARY)}'}; "
        f"{', or '.join(ways) or 'serve it on a machine with more memory'}."
    )
