"""Replacing weights in a running engine: the part in its workers.

On a CPU, vLLM 0.32 packs experts for its kernel at the first load, and writes later weights
unpacked into the packed tensor.  A tied head keeps the packed copy of the first embedding.  Answers
are then silently wrong, and after a failed reload some weights have no values.  So AttnRes models
are loaded anew as a whole (``compat.renewal``), after all tensors were validated.

A worker returns problems and never raises: if several workers raise, vLLM reads only one.

Remove this with a vLLM whose ``reload_weights`` is exact for all models on a CPU.
"""

from typing import Any

from attnres_serve.compat import device, engine_config, host, renewal, tensor_file, versions
from attnres_serve.compat.patch import Patch
from attnres_serve.errors import CheckpointError, SettingError, first_line

RELOAD, FINISH = "reload_weights", "finish_weight_update"
START, START_DRAFT = "start_weight_update", "start_draft_weight_update"
INIT, SHUTDOWN = "init_weight_transfer_engine", "shutdown_weight_transfer_engine"
PIECE = "update_weights"
STEPS = (INIT, SHUTDOWN, START, START_DRAFT, PIECE, FINISH)
FORMATS = ("auto", "safetensors", "dummy")  # tried values of --load-format
QUANTIZED = (None, "compressed-tensors")
SINCE = (0, 32)  # the first vLLM that was tried
# An argument for workers: our engine calls, with an empty cache.
FROM_ENGINE = "attn_res_from_engine"
FILE = "attn_res_file"  # an argument for workers: a file of tensors
BACKEND = "shared_memory"
WAY = "start a new engine with the new weights."


def fixed(vllm_config: Any) -> str | None:
    """The reason why nothing of a model can change in an engine; None if something can."""
    reasons = {
        "on a GPU, where that was never tried": not device.is_cpu(),
        "of a vLLM before 0.32, with which that was not tried": versions.is_older_than(SINCE),
        "with a KV connector, which would keep what the old ones computed": (
            engine_config.connectors(vllm_config)
        ),
        "of several replicas": vllm_config.parallel_config.data_parallel_size > 1,
        # Each would know only the updates that it made.
        "behind several API servers": not engine_config.is_only_api_server(vllm_config),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def problem(vllm_config: Any) -> str | None:
    """The reason why weights cannot be replaced in an engine, in one sentence; None if they can."""
    load_format = vllm_config.load_config.load_format
    quantized = vllm_config.model_config.quantization
    reasons = {
        f"with weights quantized by {quantized}": quantized not in QUANTIZED,
        "with LoRA adapters": engine_config.uses_lora(vllm_config),
        f"with --load-format {load_format}": load_format not in FORMATS,
    }
    applies = fixed(vllm_config) or next((one for one, is_so in reasons.items() if is_so), None)
    return applies and f"weights cannot be replaced in a running engine {applies}; {WAY}"


def check_start(vllm_config: Any) -> None:
    """Raise SettingError for an engine that would receive weights in an untried way."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is None:
        return
    if transfer.backend != BACKEND:
        raise SettingError(
            f"--weight-transfer-config asks for {transfer.backend}, with which AttnRes models were "
            f'never tried; use {{"backend": "{BACKEND}"}}.'
        )
    if (sentence := problem(vllm_config)) is not None:
        raise SettingError(sentence)


def offer() -> None:
    """Register our way of receiving weights in vLLM (idempotent)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "attnres_serve.compat.weight_transfer", "SharedMemoryEngine"
        )


def _reloading(original: Any) -> Any:
    """Validate all weights of AttnRes models first, and load them as a whole."""

    def reload_weights(
        self,
        weights_iterator=None,
        weights_path=None,
        is_checkpoint_format=True,
        is_partial=False,
        attn_res_from_engine=False,
        attn_res_file=None,
    ):
        model = self.get_model()
        if not hasattr(model, "attn_res_base"):
            return original(self, weights_iterator, weights_path, is_checkpoint_format)

        def reload() -> None:
            if not attn_res_from_engine:
                raise SettingError(
                    f"{RELOAD} was called in a worker, and the prefix cache would keep what the "
                    f'old weights computed; call collective_rpc("{RELOAD}") of the engine.'
                )
            if not is_checkpoint_format:
                raise SettingError(
                    "weights come as a checkpoint has them; leave is_checkpoint_format out."
                )
            if type(is_partial) is not bool:
                raise SettingError(f"is_partial is {is_partial!r}; it is True or False.")
            if weights_iterator is None and attn_res_file is None:
                model.attn_res_read(self, weights_path)
                return
            tensors = weights_iterator
            if tensors is None:
                tensors = tensor_file.tensors_of(attn_res_file)
            update = model.attn_res_begin(self, is_partial=is_partial)
            for name, tensor in tensors:
                update.take(name, tensor)
            update.apply()

        return _answer(self, reload)

    return reload_weights


def _stepping(original: Any) -> Any:
    """Return the problem of a step of an update, for AttnRes models."""
    name = original.__name__

    def step(self, *args, **kwargs):
        model = self.get_model()
        if not hasattr(model, "attn_res_base"):
            return original(self, *args, **kwargs)

        def go() -> None:
            if name not in (PIECE, FINISH):
                _discard(self)  # an update that was begun and abandoned
            try:
                original(self, *args, **kwargs)
                if name in (START, START_DRAFT):
                    engine = self.weight_transfer_engine
                    engine.update = model.attn_res_begin(self, name == START_DRAFT, engine.partial)
            except BaseException:
                _discard(self)
                raise
            if name == FINISH:
                _discard(self)

        return _answer(self, go)

    return step


def _discard(worker: Any) -> None:
    """End the update of a worker, if any, and free its tensors."""
    worker._weight_update_active = False
    if (engine := worker.weight_transfer_engine) is not None:
        engine.update = None
        engine.reset_weight_update_target()


def _answer(worker: Any, call: Any) -> dict[str, Any]:
    """The result of a worker's call: the problem, and the models whose weights are not whole."""
    from vllm.config import set_current_vllm_config

    problem = None
    try:
        with set_current_vllm_config(worker.vllm_config):
            call()
    except (CheckpointError, SettingError) as error:
        problem = str(error)
    except Exception as error:
        host.logger().exception("AttnRes: weights could not be replaced")
        problem = (
            f"weights could not be replaced ({first_line(error)}); the engine's log says more."
        )
    return {"problem": problem, "broken": sorted(getattr(worker, "attn_res_broken", ()))}


def _recording(original: Any) -> Any:
    def record_metadata_for_reloading(model):
        original(model)
        renewal.blanks[model] = renewal.Blank(model)

    return record_metadata_for_reloading


WHY = "weights replaced in a running engine gave wrong answers silently"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
WORKERS = (
    Patch(
        targets=(f"{_WORKER}.{RELOAD}",),
        make=_reloading,
        why=WHY,
        models="AttnRes models",
        first=(0, 28),
        report="weights-replaced-on-cpu",
    ),
    Patch(
        targets=tuple(f"{_WORKER}.{name}" for name in STEPS),
        make=_stepping,
        why="a worker that raised left its answer to a later call",
        models="AttnRes models",
        first=SINCE,
    ),
    Patch(
        targets=("vllm.model_executor.model_loader.utils:record_metadata_for_reloading",),
        make=_recording,
        why=WHY,
        models="AttnRes models",
        first=SINCE,
        report="weights-replaced-on-cpu",
    ),
)
