"""The choice of the backend and the algorithm that compute the sites of a worker."""

import os
from typing import TYPE_CHECKING, cast

from attnres_serve import settings
from attnres_serve.compat import decoder, device, engine_config, host
from attnres_serve.errors import SettingError
from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import Backend, BackendError, BankBackend

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

# From so many blocks on, two-phase was faster on CPU in every measurement
# (docs/measure/results.md).
MANY_BLOCKS = 24
# At least so many blocks, each of at least so many sublayers, and at most this hidden size: on an
# H100 the sites of two-phase were then at least 6 % faster for one token, and at most 4 % slower
# with 64, 256, 1024 and 8192 tokens, summed from blocks on 2, 4 and 8 rows (docs/measure/gpu.md).
BLOCKS_ON_GPU, SUBLAYERS_ON_GPU, HIDDEN_ON_GPU = 6, 6, 7168
# Compute capability; the kernels were compiled and inspected for no older one.
TRITON_SINCE = (8, 0)
SHOWN = "the triton backend was shown on CUDA alone"


def require(requested: str | None) -> None:
    """Refuse a backend that this build of vLLM cannot run, without importing vLLM.

    Raises:
        SettingError: with the message that a worker would fail with.
    """
    kind = device.kind()
    is_known = kind != device.Kind.OTHER  # otherwise a worker raises
    if requested == "triton" and is_known and not _has_triton():
        raise SettingError(
            "--attnres-backend is triton, which was shown on CUDA alone, and this vLLM is built "
            f"for {kind}; leave it out, or choose torch."
        )


def _has_triton() -> bool:
    """Whether the triton backend may run: on CUDA, and on a CPU in Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off")
    return device.is_cuda() or (device.is_cpu() and interpreted)


def choose(vllm_config: "VllmConfig") -> tuple[str, Backend]:
    """The backend by name and ready to run.

    ``auto`` is cpp on CPU if it compiles, triton on a CUDA device of compute capability 8.0 or
    later if its results agree with the reference, and otherwise torch, with a warning.  In vLLM's
    batch-invariant mode ``auto`` is triton, which computes each token alone and in one order; that
    mode does not replace the sums of the torch backend.

    All workers choose the same backend: they hold copies of the same activations, which must stay
    equal.  The name is written back to ``additional_config``, which is part of vLLM's compile-cache
    key: a graph compiled for one backend must never run for another.

    Raises:
        SettingError: the requested backend cannot run here.
    """
    name = settings.choice(vllm_config.additional_config, settings.BACKEND_KEY)
    if host.batch_invariant():
        name = _invariant(name)
    _require_device(name)
    if name == settings.AUTO:
        name = _fastest(vllm_config)
    try:
        backend = _load(name, vllm_config.model_config.dtype)
    except BackendError as error:
        raise SettingError(str(error)) from None
    engine_config.set_additional(vllm_config, settings.BACKEND_KEY, name)
    if name == "cpp":
        _log_slower_calls(vllm_config)
    return name, backend


def choose_algorithm(vllm_config: "VllmConfig", blocks: int, sublayers: int, backend: str) -> str:
    """The algorithm by name.

    ``auto`` is two_phase with the cpp backend from ``MANY_BLOCKS`` blocks on, and with the triton
    backend where two_phase was faster in measurements (``BLOCKS_ON_GPU``).  Otherwise it is
    single_pass, which makes the fewest calls and, with few blocks, moves the fewest bytes.  The
    choice does not depend on the batch.

    Args:
        vllm_config: vLLM's configuration.
        blocks: number of the model's blocks without the embedding.
        sublayers: number of the model's sublayers.
        backend: its name.
    """
    name = settings.choice(vllm_config.additional_config, settings.ALGORITHM_KEY)
    if name != settings.AUTO:
        return name
    if backend == "cpp" and blocks >= MANY_BLOCKS:
        return "two_phase"
    if backend == "triton" and _pays_on_gpu(vllm_config, blocks, sublayers):
        return "two_phase"
    return "single_pass"


def _pays_on_gpu(vllm_config: "VllmConfig", blocks: int, sublayers: int) -> bool:
    import torch  # not above, as in ``_triton_problem``

    model = vllm_config.model_config
    measured = model.dtype == torch.bfloat16 and model.get_hidden_size() <= HIDDEN_ON_GPU
    long = blocks >= BLOCKS_ON_GPU and sublayers >= SUBLAYERS_ON_GPU * blocks
    return measured and long and not host.batch_invariant()


def _load(name: str, dtype: "torch.dtype") -> Backend:
    backend = backends.load(name, dtype)
    if name == "triton":
        from attnres_serve.kernels.triton import common

        common.take_each_token_alone(host.batch_invariant())
    return backend


def _log_slower_calls(vllm_config: "VllmConfig") -> None:
    """Log one line if compiled graphs have to call the cpp backend through torch's dispatcher."""
    from attnres_serve.kernels.cpp import direct

    if direct.problem is None or vllm_config.model_config.enforce_eager:
        return
    if decoder.is_first_worker():
        host.logger().warning(
            "AttnRes: compiled graphs call sites by torch's dispatcher, which slows decode: %s",
            direct.problem,
        )


def _require_device(name: str) -> None:
    if name == "cpp" and not device.is_cpu():
        raise SettingError("the cpp backend runs on CPU only; choose the torch backend.")
    if name == "triton" and not _has_triton():
        raise SettingError(
            f"{SHOWN}, and vLLM runs on {device.kind()} here; choose the torch backend."
        )


def _invariant(requested: str) -> str:
    if not device.is_cuda():
        raise SettingError(
            "VLLM_BATCH_INVARIANT is set, which the triton backend alone heeds, and vLLM runs on "
            f"{device.kind()} here, where that was not shown; unset it."
        )
    if requested not in ("triton", settings.AUTO):
        raise SettingError(
            f"VLLM_BATCH_INVARIANT is set, which the {requested} backend does not heed; choose the "
            "triton backend."
        )
    return "triton"


def _fastest(vllm_config: "VllmConfig") -> str:
    """cpp or triton if every worker can load it, and otherwise torch, with one warning."""
    on_cpu = device.is_cpu()
    name = "cpp" if on_cpu else "triton"
    problem = _cpp_problem(vllm_config) if on_cpu else _triton_problem(vllm_config)
    if decoder.all_workers(problem is None):
        return name
    host.logger().warning(
        "AttnRes runs on the slower torch backend: %s",
        problem or f"another worker could not load the {name} backend.",
    )
    return "torch"


def _cpp_problem(vllm_config: "VllmConfig") -> str | None:
    try:
        backends.load("cpp", vllm_config.model_config.dtype)
    except BackendError as error:
        return str(error)
    return None


def _triton_problem(vllm_config: "VllmConfig") -> str | None:
    import torch  # not above: the command line imports this module for the names of backends

    from attnres_serve.kernels import comparison

    model = vllm_config.model_config
    try:
        capability = device.capability()
        if capability is None:
            return f"{SHOWN}, and vLLM runs on {device.kind()} here."
        if capability < TRITON_SINCE:
            return (
                f"the triton backend is chosen on CUDA devices from {_dotted(TRITON_SINCE)} on "
                f"(compute capability), and this is one of {_dotted(capability)}."
            )
        backend = cast("BankBackend", _load("triton", model.dtype))
        here = torch.device("cuda", torch.cuda.current_device())
        differs = comparison.difference(backend, model.get_hidden_size(), model.dtype, here)
    except Exception as error:  # a compiler or a device may raise anything
        return f"the triton backend failed on this device ({type(error).__name__}: {error})."
    if differs:
        return f"the triton backend is wrong on this device: {differs}."
    return None


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
