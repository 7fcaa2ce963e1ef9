"""The KV cache that a server takes on a CPU, told before its start.

On a GPU vLLM measures what is left beside the weights.  On a CPU it would take most of the memory.
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
from attnres_serve.start import memory

VARIABLE = environment.CACHE  # whole GiB for every worker
FLAG = "--kv-cache-memory-bytes"  # the variable has precedence
LEFT_TO_VLLM = ("gpu_memory_utilization", "num_gpu_blocks_override")  # other ways to say it
GIB = 2**30
UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
CONTEXTS = 4  # that the cache holds, if
LEAST = GIB  # and
SHARE = 4  # at most this part of what is free allow it


@dataclass(frozen=True)
class Cache:
    """The KV cache of a server.

    Attributes:
        size: bytes that every worker takes.
        workers: how many of them there are on this machine.
        tokens: how many tokens one engine's cache holds; with recurrent layers or windows fewer
            or more, as their states do not grow with the context.
        is_chosen: whether no variable and no flag says how large it is.
    """

    size: int
    workers: int
    tokens: int
    is_chosen: bool

    def __str__(self) -> str:
        each = f" for each of {self.workers} workers" if self.workers > 1 else ""
        return f"{amount(self.size)}{each}, {self.tokens:,} tokens"


def of(name: str, parsed: ParsedConfig, arguments: Arguments | None = None) -> Cache | None:
    """The cache that a server on this machine will have; None where vLLM measures it.

    Args:
        name: what the checkpoint is called.
        parsed: what the resolver made of it.
        arguments: of vLLM's server.

    Raises:
        CheckpointError: it would not hold one sequence as long as the context.
        SettingError: a variable or a flag asks for what cannot be.
    """
    arguments = arguments or Arguments()
    given = _given(arguments)
    left_to_vllm = given is None and arguments.has(*LEFT_TO_VLLM)
    if left_to_vllm or not device.is_cpu():
        return None
    family, config = FAMILIES[parsed.family], parsed.config
    asked = arguments.length
    context = asked or needs.context(config)
    asked_workers = workers_of(arguments)
    workers, shares = asked_workers.count, (asked_workers.stages, asked_workers.ranks)
    need = _of_a_context(family, config, context, arguments, shares)
    free = min(memory.left(), workers * memory.left_on_a_node())
    most = free // (SHARE * workers)
    size, said = given or (min(max(CONTEXTS * need, LEAST), most), None)
    if said is not None and size * workers > free:
        raise SettingError(
            f"{said} takes {amount(size * workers)} of memory"
            f"{f' in {workers} workers' if workers > 1 else ''}, and {amount(free)} are free; ask "
            "for less."
        )
    found = Cache(size, workers, size * context // need, said is None)
    block, least = blocks.size_of(family, arguments), context
    if blocks.is_filled_by_tokens(family, config):
        least = (math.ceil(context / block) + blocks.HELD_BACK) * block
    if found.tokens < least and not blocks.has_windows(family, config):
        whose = (
            f"--max-model-len {context}" if asked else f"{name} with {context} tokens of context"
        )
        need = need * least // context
        raise CheckpointError(_too_small(whose, found, need, block, free, said))
    return found


def amount(size: int) -> str:
    """Bytes in the unit of the variable, or in a smaller one."""
    unit = next((unit for unit, bytes_of in UNITS.items() if size >= bytes_of), "KiB")
    return f"{size / UNITS[unit]:.1f} {unit}"


def _given(arguments: Arguments) -> tuple[int, str] | None:
    """The bytes that the variable or the flag asks for, and its name; None where neither does."""
    if said := os.environ.get(VARIABLE, "").strip():
        if not said.isdecimal() or not int(said):
            raise SettingError(
                f"{VARIABLE} is {os.environ[VARIABLE]!r}; expected a whole number of GiB from 1 "
                f"on, and {FLAG} takes any number of bytes."
            )
        return int(said) * GIB, f"{VARIABLE}={said}"
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
    """Bytes of a worker's cache that a sequence as long as the context takes."""
    width = 4 if arguments.dtype in ("float32", "float") else 2
    of_cache = 1 if arguments.kv_cache_dtype.startswith("fp8") else width
    stages, ranks = shares
    layers = config["num_hidden_layers"]
    share = math.ceil(layers / stages) / layers
    # Every rank has the whole latents, and at least one head.
    heads = 1 if family.is_latent else config.get("num_key_value_heads") or ranks
    of_tokens = tokens * family.cache_elements(config) * of_cache / min(ranks, heads)
    return math.ceil(share * (of_tokens + family.state_bytes(config, width) / ranks)) or 1


def _too_small(whose: str, found: Cache, need: int, block: int, free: int, said: str | None) -> str:
    """The sentence for a cache that does not hold one sequence as long as the context."""
    each = " in each worker" if found.workers > 1 else ""
    limit = f"a quarter of the free memory is {amount(found.size * found.workers)}"
    ways = []
    if shorter := max(found.tokens // block - blocks.HELD_BACK, 0) * block:
        ways.append(f"give `serve` --max-model-len {shorter} or less")
    if (larger := math.ceil(need / GIB)) * GIB * found.workers <= free:
        ways.append(f"set {VARIABLE}={larger} (GiB)")
    return (
        f"{whose} needs {amount(need)} of KV cache{each}, and "
        f"{limit if said is None else f'{said} allows {amount(found.size)}'}; "
        f"{', or '.join(ways) or 'serve it on a machine with more memory'}."
    )
