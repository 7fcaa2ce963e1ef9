"""Weights that take the place of others in a running engine.

vLLM 0.32 packs experts for its kernel on a CPU when they are first loaded, and writes later ones
unpacked into the packed place.  A tied head keeps the packed copy of the first embedding.  Answers
are wrong then, without a word, and after a reload that fails half-way weights have no values.  So a
reload is refused before any weight is touched, except where it was measured to be exact: then whole
checkpoints that were validated take the place of each other, and the prefix cache is emptied.

This can go with a vLLM whose ``GPUModelRunner.reload_weights`` is exact for all models on a CPU.
"""

from typing import Any

from attnres_serve.compat import device, engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.errors import SettingError
from attnres_serve.families import BY_ARCHITECTURE

RELOAD = "reload_weights"
# Methods of vLLM's workers that change weights in another way, and were never measured.
OTHERS = (
    "finish_weight_update",
    "init_weight_transfer_engine",
    "load_model",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_config",
    "update_weights",
)
FORMATS = ("auto", "safetensors")  # of --load-format, whose files are those that are validated
ASKED = "attn_res_asked"  # an argument for workers: it comes from here, and the cache is empty
WAY = "start a new engine with the new weights."
BUSY = (
    "weights cannot be replaced while requests run, which would be answered by both; wait for "
    "them, or abort them."
)


def problem(vllm_config: Any) -> str | None:
    """Why weights cannot be replaced in an engine, in one sentence; None where they can."""
    config = vllm_config.model_config.hf_config
    (architecture,) = config.architectures
    family, own = BY_ARCHITECTURE[architecture], config.attn_res_config
    load_format = vllm_config.load_config.load_format
    reasons = {
        "on a GPU, where that was never tried": not device.is_cpu(),
        f"of {family.title}, where that was not shown to be exact": not family.reloads(own),
        "with a tied head, of which vLLM keeps a packed copy": own.get("tie_word_embeddings"),
        "with quantized weights": vllm_config.model_config.quantization is not None,
        "with LoRA adapters": engine_config.uses_lora(vllm_config),
        "with speculative decoding": vllm_config.speculative_config is not None,
        "with a KV connector, which would keep what the old ones computed": (
            vllm_config.kv_transfer_config is not None
        ),
        f"with --load-format {load_format}": load_format not in FORMATS,
        "of several workers": vllm_config.parallel_config.world_size_across_dp > 1,
    }
    found = next((reason for reason, is_so in reasons.items() if is_so), None)
    return found and f"weights cannot be replaced in a running engine {found}; {WAY}"


def check_start(vllm_config: Any) -> None:
    """Raise SettingError for an engine that is made to receive weights from a trainer."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise SettingError(
            "--weight-transfer-config is given, and AttnRes models do not take weights from a "
            f"trainer while they run; leave it out, and {WAY}"
        )


def _asking(own: Any) -> Any:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if _replaces(self, method):
            _require_empty(self.reset_prefix_cache())
            kwargs = {**(kwargs or {}), ASKED: True}
        return own(self, method, timeout, args, kwargs)

    return collective_rpc


def _asking_async(own: Any) -> Any:
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if _replaces(self, method):
            _require_empty(await self.reset_prefix_cache())
            _replaces(self, method)  # no request came meanwhile
            kwargs = {**(kwargs or {}), ASKED: True}
        return await own(self, method, timeout, args, kwargs)

    return collective_rpc


def _sleeping(own: Any) -> Any:
    def sleep(self, level=1, *args, **kwargs):
        _check_sleep(self, level)
        return own(self, level, *args, **kwargs)

    return sleep


def _sleeping_async(own: Any) -> Any:
    async def sleep(self, level=1, *args, **kwargs):
        _check_sleep(self, level)
        return await own(self, level, *args, **kwargs)

    return sleep


def _reloading(own: Any) -> Any:
    """Have a worker refuse what reached it another way, and validate what it reads."""

    def reload_weights(
        self,
        weights_iterator=None,
        weights_path=None,
        is_checkpoint_format=True,
        attn_res_asked=False,
    ):
        model = self.get_model()
        if not hasattr(model, "attn_res_base"):
            own(self, weights_iterator, weights_path, is_checkpoint_format)
            return
        if (found := problem(self.vllm_config)) is not None:
            raise SettingError(found)
        if not attn_res_asked:
            raise SettingError(
                f"{RELOAD} was called in a worker, and the prefix cache would keep what the old "
                f'weights computed; call collective_rpc("{RELOAD}") of the engine.'
            )
        if weights_iterator is not None or not is_checkpoint_format:
            raise SettingError(
                f"{RELOAD} reads whole checkpoints of AttnRes models and takes no tensors; give it "
                "weights_path, the folder of a checkpoint."
            )
        with model.attn_res_expecting(weights_path or self.vllm_config.model_config.model):
            own(self, weights_path=weights_path)

    return reload_weights


def _replaces(engine: Any, method: Any) -> bool:
    """Whether a call replaces the weights of an AttnRes model.

    Raises:
        SettingError: it would leave an engine with other weights than it says.
    """
    if not engine_config.has_attn_res(engine.vllm_config):
        return False
    if method in OTHERS:
        raise SettingError(f"{method} is not supported with AttnRes while an engine runs; {WAY}")
    if method != RELOAD:
        return False
    if (found := problem(engine.vllm_config)) is not None:
        raise SettingError(found)
    if engine.output_processor.has_unfinished_requests():
        raise SettingError(BUSY)
    return True


def _require_empty(is_empty: bool) -> None:
    """Raise SettingError where the prefix cache could not be emptied, as a request still has it.

    It is emptied first: what comes while weights are replaced is computed with the new ones.
    """
    if not is_empty:
        raise SettingError(BUSY)


def _check_sleep(engine: Any, level: int) -> None:
    """Raise SettingError for a sleep that discards the weights; on a CPU none does."""
    if level > 1 and engine_config.has_attn_res(engine.vllm_config) and not device.is_cpu():
        raise SettingError(
            f"sleep level {level} discards the weights, and an AttnRes model on a GPU does not get "
            "them back; use level 1, which keeps them."
        )


WHY = "weights replaced in a running engine gave wrong answers silently"
# Engines refuse such calls before they are sent: of several workers that raise, vLLM reads one.
CLIENTS = tuple(
    Patch(targets=(target,), make=make, why=WHY, models="AttnRes models", first=(0, 28))
    for target, make in {
        "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": _asking,
        "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": _asking_async,
        "vllm.v1.engine.llm_engine:LLMEngine.sleep": _sleeping,
        "vllm.v1.engine.async_llm:AsyncLLM.sleep": _sleeping_async,
    }.items()
)
WORKERS = Patch(
    targets=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
    ),
    make=_reloading,
    why=WHY,
    models="AttnRes models",
    first=(0, 28),
)
PATCHES = (*CLIENTS, WORKERS)
