"""Facts from the installed vLLM's source, read without importing it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from attnres_serve.compat import device

# Values of --tokenizer-mode that use transformers' classes.
TOKENIZER_MODES = (
    *("auto", "hf", "slow", "cohere", "inkling", "kimi_k3"),
    *("deepseek_v32", "deepseek_v4", "deepseek_v41"),
)


def module(path: str) -> Any:
    """Import a vLLM module that needs no other module, without its package.

    Raises:
        ImportError: it does not exist, or needs others.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    file = _file(path)
    spec = spec_from_file_location(f"vllm_{Path(path).stem}_alone", file) if file else None
    if spec is None or spec.loader is None:
        raise ImportError(f"vLLM has no {path}")
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _source(path: str) -> str | None:
    """The text of a file of vLLM's package; None if it does not exist."""
    file = _file(path)
    return _text(file) if file else None


@cache
def _text(file: Path) -> str:
    """The text of a file, cached because flags are looked up one by one."""
    return file.read_text(encoding="utf-8")


def _file(path: str) -> Path | None:
    from importlib.util import find_spec

    spec = find_spec("vllm")
    file = Path(spec.origin).parent / path if spec and spec.origin else None
    return file if file and file.is_file() else None


def lists_architecture(name: str) -> bool:
    """Whether vLLM or another plugin has a model class under this name.

    If vLLM has not been imported, its table is read as text.
    """
    import sys

    if models := sys.modules.get("vllm.model_executor.models.registry"):
        return name in models.ModelRegistry.models
    return f'"{name}":' in (_source("model_executor/models/registry.py") or "")


# Suffixes of architectures; vLLM treats them all like the first.
_ENDINGS = (
    *("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding"),
    *("EmbeddingModel", "ForSequenceClassification", "ForTokenClassification"),
    *("ClassificationModel", "ForRewardModeling", "RewardModel", "Model"),
)


def listed_class(name: str) -> str | None:
    """The name of vLLM's class for an architecture, from the text of its table.

    None for an unknown architecture.
    """
    text = _source("model_executor/models/registry.py") or ""
    stem = next((name.removesuffix(end) for end in _ENDINGS if name.endswith(end)), None)
    for candidate in (name, f"{stem}{_ENDINGS[0]}") if stem else (name,):
        if match := re.search(rf'"{re.escape(candidate)}": \(\s*"\w+",\s*"(\w+)"', text):
            return match[1]
    return None


def lists_head(name: str) -> bool:
    """Whether vLLM has a class of draft heads under this name, from the text of its table."""
    text = _source("model_executor/models/registry.py") or ""
    heads = text.partition("_SPECULATIVE_DECODING_MODELS = {")[2].partition("\n}")[0]
    return f'"{name}":' in re.sub("#.*", "", heads)


CPUINFO = Path("/proc/cpuinfo")
UNLISTED_HEAD_SIZES = {48}  # vLLM's kernels support it, although its list omits it


def head_sizes() -> list[int] | None:
    """The head sizes that vLLM's attention supports on CPU, read from its source.

    None on another device, whose backends support every usual size, or if unknown.
    """
    source = _source("v1/attention/backends/cpu_attn.py") if device.is_cpu() else None
    listed = source and _listed_sizes(source)
    return sorted({*listed, *UNLISTED_HEAD_SIZES}) if listed else None


def _listed_sizes(source: str) -> list[int] | None:
    """The sizes in the list of a source's first backend; None without a list."""
    match = re.search(r"def get_supported_head_sizes.*?return \[([\d, \n]+)\]", source, re.S)
    return [*map(int, re.findall(r"\d+", match[1]))] if match else None


def block_step() -> int | None:
    """The step of block sizes of vLLM's KV cache on CPU, in tokens.

    None on another device, or if unknown.
    """
    source = _source("v1/attention/backends/cpu_attn.py") if device.is_cpu() else None
    match = re.search(
        r"def get_supported_kernel_block_sizes.*?MultipleOf\((\d+)\)", source or "", re.S
    )
    return int(match[1]) if match else None


def lacks_int8() -> bool:
    """Whether this x86 CPU has no instructions for dot or matrix products of 8-bit integers.

    Products of INT8 layers are then wrong: a divergence of 0.07 to 0.31 nats instead of 0.007 at
    most (vLLM 0.32 on a processor with only AVX2).
    """
    cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    return "\nflags" in cpuinfo and not re.search(r"\b(avx512_vnni|avx_vnni|amx_int8)\b", cpuinfo)


def has_amx() -> bool:
    """Whether this CPU has Intel's matrix instructions."""
    return CPUINFO.is_file() and "amx_tile" in CPUINFO.read_text(encoding="utf-8").split()


def lacks_quantized_experts() -> bool:
    """Whether vLLM's CPU build has no kernel for quantized experts here.

    vLLM 0.32 has them on x86 for CPUs with AMX, and with zentorch.
    """
    from importlib.util import find_spec
    from platform import machine

    if machine() not in ("x86_64", "AMD64"):
        return False
    return not has_amx() and find_spec("zentorch") is None


def latent_rows() -> list[int] | None:
    """The row sizes that vLLM's latent attention supports, in channels, read from its source.

    None on CPU, where every size is supported, or if unknown.
    """
    path = "model_executor/layers/attention/mla_attention.py"
    source = None if device.is_cpu() else _source(path)
    listed = source and _listed_sizes(source.partition("class MLACommonBackend(")[2])
    return sorted(listed) if listed else None
