"""Reading and setting values of an engine's ``VllmConfig``."""

from pathlib import Path

from attnres_serve.compat import device, source
from attnres_serve.errors import SettingError
from attnres_serve.kernels import fingerprint


def has_attn_res(vllm_config) -> bool:
    """Whether the model is one of ours, from ``model.config.build``."""
    return hasattr(vllm_config.model_config.hf_config, "attn_res_config")


def require_safetensors(vllm_config) -> None:
    """Keep vLLM from falling back to pickles if a checkpoint has no safetensors files."""
    from_object_storage = getattr(vllm_config.model_config, "model_weights", "")
    if vllm_config.load_config.load_format == "auto" and not from_object_storage:
        vllm_config.load_config.load_format = "safetensors"


def reads_weights_from(vllm_config) -> tuple[str, str | None] | None:
    """The folder or model id, and its revision, of the safetensors files to read, if any."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format != "safetensors":
        return None
    return model.model, model.revision


def reads_tokenizer_from(vllm_config) -> str | None:
    """The folder or model id of the tokenizer, if vLLM reads it with Hugging Face's classes."""
    model = vllm_config.model_config
    usual = str(model.tokenizer_mode) in source.TOKENIZER_MODES
    return None if model.skip_tokenizer_init or not usual else model.tokenizer


def read_tokenizer_from(vllm_config, folder: Path) -> None:
    """Set the folder of the tokenizer for all processes of an engine."""
    model = vllm_config.model_config
    model.tokenizer, model.tokenizer_revision = str(folder), None


def speculation_method(vllm_config) -> str | None:
    config = vllm_config.speculative_config
    return config.method if config is not None else None


WORKER_EXTENSION = "attnres_serve.worker.WorkerExtension"


def install_worker_extension(vllm_config) -> None:
    """Install our worker extension for ``collective_rpc``, unless the user has another."""
    if not vllm_config.parallel_config.worker_extension_cls:
        vllm_config.parallel_config.worker_extension_cls = WORKER_EXTENSION


def has_worker_extension(vllm_config) -> bool:
    return vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION


def uses_lora(vllm_config) -> bool:
    return vllm_config.lora_config is not None


def connectors(vllm_config) -> list[str]:
    """The flags of KV connectors; vLLM makes one of the second after it has called the plugin."""
    flags = {
        "--kv-transfer-config": vllm_config.kv_transfer_config,
        "--kv-offloading-size": vllm_config.cache_config.kv_offloading_size,
    }
    return [flag for flag, value in flags.items() if value is not None]


def uses_ray(vllm_config) -> bool:
    """Whether Ray starts the workers."""
    return vllm_config.parallel_config.distributed_executor_backend == "ray"


def has_tokenizer(vllm_config) -> bool:
    """Whether prompts may be text."""
    return not vllm_config.model_config.skip_tokenizer_init


def pools(vllm_config) -> bool:
    """Whether vLLM would run the model as an embedding model or a classifier."""
    return vllm_config.model_config.runner_type == "pooling"


def keep_states_in_float32(vllm_config) -> None:
    """Keep recurrent states in float32 unless the user chose a dtype."""
    if vllm_config.cache_config.mamba_ssm_cache_dtype == "auto":
        vllm_config.cache_config.mamba_ssm_cache_dtype = "float32"


def tell_origin(vllm_config) -> None:
    """Put the source and the processor of this worker's code into vLLM's compile-cache key."""
    origin = [fingerprint.source()]
    if device.is_cpu():
        origin += [fingerprint.processor(), fingerprint.vectors()]
    set_additional(vllm_config, "compiled_by_attnres", " ".join(origin))


def set_additional(vllm_config, key: str, value: str) -> None:
    """Set a key of ``additional_config``, which is part of vLLM's compile-cache key."""
    vllm_config.additional_config = {**(vllm_config.additional_config or {}), key: value}


def require_few_logprobs(vllm_config, field: str, count: int | None) -> None:
    """Refuse more logprobs in a trace than the engine allows in other requests.

    Args:
        vllm_config: of the engine.
        field: the field of the request.
        count: the number of most probable tokens; None for no logprobs.

    Raises:
        SettingError: the number is too high.
    """
    config = vllm_config.model_config
    limit = config.get_vocab_size() if config.max_logprobs == -1 else config.max_logprobs
    if count is not None and count > limit:
        raise SettingError(f"{field} is {count}; expected at most {limit} (--max-logprobs).")


def longest_answer(vllm_config, max_tokens: int) -> int:
    """``max_tokens``, or the lower bound of answers in the server's generation config.

    vLLM's routes do the same: by --override-generation-config, or a folder of --generation-config.
    """
    model = vllm_config.model_config
    if model.generation_config in ("auto", "vllm"):
        bound = model.override_generation_config.get("max_new_tokens")
    else:
        bound = model.get_diff_sampling_param().get("max_tokens")
    return max_tokens if bound is None else min(max_tokens, bound)


def is_first_api_server(vllm_config) -> bool:
    """Whether this is the first of the servers of --api-server-count."""
    return vllm_config.parallel_config._api_process_rank == 0


def is_only_api_server(vllm_config) -> bool:
    """Whether this server has no launcher, which would end it by another signal."""
    return vllm_config.parallel_config._api_process_count == 1


def bytes_of_a_row(vllm_config, tokens: int) -> int:
    """Bytes of one row of the bank for ``tokens``."""
    model = vllm_config.model_config
    return tokens * model.hf_config.hidden_size * model.dtype.itemsize
