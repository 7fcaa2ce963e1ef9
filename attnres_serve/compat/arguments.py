"""Values of flags on the command line, in a file and in variables, read once before vLLM.

``parser`` states the precedence of these places.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from attnres_serve.compat.flags import parser, spelling, table, variables
from attnres_serve.compat.flags.flag import Flag
from attnres_serve.errors import CheckpointError, SettingError


@dataclass(frozen=True)
class Arguments:
    """Values of vLLM's flags under vLLM's names, with vLLM's defaults for absent flags.

    Attributes:
        values: all stated values, also those without an attribute, and those of our flags.
        unknown: arguments of unknown flags; they are left to vLLM.
        vllm_argv: the arguments for vLLM's parser, without the model and our flags.
        places: the line of a file, or the variable, that states a value; none for the command
            line.
        max_model_len, kv_cache_memory_bytes: ``k`` and ``K`` are resolved; -1 means ``auto``.
        lora_modules: each with ``name`` and ``path``.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    vllm_argv: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    api_key: list[str] | None = None
    api_server_count: int | None = None
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
        """Tokens of the longest sequence; None if not stated, or as many as fit."""
        limit = self.max_model_len
        return None if limit is None or limit < 1 else limit

    def has(self, *names: str) -> bool:
        """Whether one of some values is stated and not ``None``."""
        return any(self.values.get(name) is not None for name in names)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Let errors begin with the places of the flags that they name, except the command line."""
        try:
            yield
        except (CheckpointError, SettingError) as error:
            where = " and ".join(dict.fromkeys(self._places_of(error)))
            if not where:
                raise
            raise type(error)(f"{where}: {error}") from None

    def _places_of(self, error: Exception) -> list[str]:
        """The places of the flags in an error's message, or else of the model."""
        matches = re.findall(r"--(?:no-)?([a-z0-9-]+)|([a-z0-9]+(?:_[a-z0-9]+)+)", str(error))
        names = [(flag or name).replace("-", "_") for flag, name in matches]
        if not {*names} & {*self.places} and isinstance(error, CheckpointError):
            names = ["model"]
        return [self.places[name] for name in names if name in self.places]


NAMES = {one.name for one in fields(Arguments)}


def of_serve(
    checkpoint: str | None,
    argv: Sequence[str],
    ours: Sequence[Flag],
    environment: Mapping[str, str] | None,
    others: Collection[str] = (),
) -> Arguments:
    """The arguments of ``attnres-serve serve``.

    Args:
        checkpoint: the positional argument instead of ``--model``; None without one.
        argv: our and vLLM's flags, and their values.
        ours: our flags.
        environment: variables that may state our flags too; None to read none.
        others: further names of flags for suggestions.

    Raises:
        SettingError: vLLM would refuse one of them; one sentence.
    """
    if checkpoint is not None:
        if any(spelling.is_flag(word, spelling.MODEL) for word in argv):
            raise SettingError(
                f"found {spelling.MODEL} beside the checkpoint {checkpoint!r}; give the checkpoint "
                "once, right after the command."
            )
        argv = [f"{spelling.MODEL}={checkpoint}", *argv]
    return _arguments(argv, ours, others, environment)


def of_server(argv: Sequence[str]) -> Arguments:
    """The arguments of the installed vLLM's server.

    Args:
        argv: vLLM's flags and their values.

    Raises:
        SettingError: vLLM would refuse them; one sentence.
    """
    return _arguments(argv)


def of_engine(
    argv: Sequence[str], ours: Sequence[Flag] = (), others: Collection[str] = ()
) -> Arguments:
    """The arguments of an engine, which has fewer flags than a server.

    Args:
        argv: flags and their values.
        ours: our flags.
        others: further names of flags for suggestions.
    """
    of_others = {
        word for flag in table.of_installed()[0] if not flag.of_engine for word in flag.spellings
    }
    for name in (spelling.dashed(word).partition("=")[0] for word in argv):
        if name in of_others - {spelling.CONFIG}:
            raise SettingError(f"found {name}, which is no flag of an engine alone; leave it out.")
    return _arguments(argv, ours, others, of_engine=True)


def among(argv: Sequence[str]) -> Arguments:
    """The arguments of vLLM's server in a command line that has other flags too.

    Raises:
        SettingError: a flag of vLLM has an invalid value.
    """
    flags, _ = table.of_installed()
    return _made(parser.read(argv, flags, takes_any=True), flags)


def without_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that state our flags, for a temporary server."""
    return {k: v for k, v in environment.items() if not k.startswith(variables.PREFIX)}


def _arguments(
    argv: Sequence[str],
    ours: Sequence[Flag] = (),
    others: Collection[str] = (),
    environment: Mapping[str, str] | None = None,
    of_engine: bool = False,
) -> Arguments:
    flags, is_whole = table.of_installed()
    had = [flag for flag in flags if flag.of_engine or not of_engine]
    return _made(parser.read(argv, had, ours, environment, others, takes_any=not is_whole), had)


def _made(line: parser.CommandLine, flags: Sequence[Flag]) -> Arguments:
    """The arguments of a command line; values that only vLLM can read are left out."""
    known = NAMES & {flag.name for flag in flags if flag.kind}
    values = {name: value for name, value in line.values.items() if name in known}
    if names := values.get("served_model_name"):
        values["served_model_name"] = [name for name in names if name is not None]
    return Arguments(line.values, line.unknown, line.vllm_argv, line.places, **values)
