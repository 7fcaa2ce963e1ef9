"""What a command line asks of vLLM: its flags, read once and before vLLM is imported."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from attnres_serve.compat.flags import parser, table
from attnres_serve.compat.flags.flag import Flag


@dataclass(frozen=True)
class Arguments:
    """Values of vLLM's flags, each under vLLM's name, with vLLM's default where it is not given.

    Attributes:
        given: all values that are given, on the command line or in the file that ``--config``
            names, also those without an attribute.
        unknown: words that belong to no flag that is known; they are left to vLLM.
        max_model_len, kv_cache_memory_bytes: with ``k`` or ``K`` counted; -1 stands for ``auto``.
        lora_modules: each with ``name`` and ``path``.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    api_key: list[str] | None = None
    block_size: int | None = None
    compilation_config: Mapping[str, Any] | None = None
    data_parallel_rank: int | None = None
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    dtype: str = "auto"
    enable_lora: bool = False
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.92
    headless: bool = False
    host: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    load_format: str = "auto"
    lora_modules: list[Mapping[str, Any]] = field(default_factory=list)
    max_lora_rank: int = 16
    max_model_len: int | None = None
    model: str | None = None
    nnodes: int = 1
    num_gpu_blocks_override: int | None = None
    pipeline_parallel_size: int = 1
    port: int = 8000
    prefill_context_parallel_size: int = 1
    revision: str | None = None
    served_model_name: list[str] | None = None
    skip_tokenizer_init: bool = False
    spec_method: str | None = None
    spec_model: str | None = None
    spec_tokens: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    tensor_parallel_size: int = 1
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    uds: str | None = None

    @property
    def length(self) -> int | None:
        """Tokens of the longest sequence; None where that is not given, or as many as fit."""
        asked = self.max_model_len
        return None if asked is None or asked < 1 else asked

    def has(self, *names: str) -> bool:
        """Whether one of some values is given, and is not ``None``."""
        return any(self.given.get(name) is not None for name in names)


NAMES = {one.name for one in fields(Arguments)}


def of_server(words: Sequence[str], others: Collection[str] = ()) -> Arguments:
    """The arguments of a server of the installed vLLM.

    Args:
        words: flags of vLLM's and their values.
        others: names of flags that a suggestion may name besides.

    Raises:
        SettingError: vLLM would refuse them, in one sentence.
    """
    return _arguments(words, others, of_engine=False)


def of_engine(words: Sequence[str], others: Collection[str] = ()) -> Arguments:
    """The same of an engine alone, which has fewer flags."""
    return _arguments(words, others, of_engine=True)


def among(words: Sequence[str]) -> Arguments:
    """The arguments of a server among words of which others are not vLLM's.

    Raises:
        SettingError: a flag of vLLM's has a value that it does not take.
    """
    flags, _ = table.of_installed()
    return _made(parser.read(words, flags, takes_any=True), flags)


def _arguments(words: Sequence[str], others: Collection[str], of_engine: bool) -> Arguments:
    flags, is_whole = table.of_installed()
    had = [flag for flag in flags if flag.of_engine or not of_engine]
    return _made(parser.read(words, had, others, takes_any=not is_whole), had)


def _made(found: parser.Found, flags: Sequence[Flag]) -> Arguments:
    """The arguments of a command line; a value that vLLM alone can read is not known."""
    known = NAMES & {flag.name for flag in flags if flag.kind}
    values = {name: value for name, value in found.values.items() if name in known}
    if names := values.get("served_model_name"):
        values["served_model_name"] = [name for name in names if name is not None]
    return Arguments(given=found.values, unknown=found.unknown, **values)
