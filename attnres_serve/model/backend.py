"""Which backend computes the sites of this worker."""

import os
from typing import TYPE_CHECKING

from attnres_serve import settings
from attnres_serve.compat import decoder, engine_config, host, source
from attnres_serve.errors import SettingError
from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import Backend, BackendError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def require(asked: str | None) -> None:
    """Refuse a backend that has no place in this build of vLLM, which is not imported.

    Raises:
        SettingError: with the sentence that a worker would end with.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off")
    if asked == "triton" and source.is_cpu_build() and not interpreted:
        raise SettingError(
            "--attnres-backend is triton, which needs a GPU, and this vLLM is built for CPU; leave "
            "it out, or choose cpp or torch."
        )


def choose(vllm_config: "VllmConfig") -> tuple[str, Backend]:
    """The backend by name and ready to run; ``auto`` is cpp on CPU where it can be compiled.

    In vLLM's batch-invariant mode it is triton, which computes each token alone and in one order;
    the sums of the torch backend are not among the operators that the mode replaces.

    All workers choose the same: they hold copies of the same activations, which must stay equal.
    The name is written back to ``additional_config``, which is part of vLLM's compile-cache key: a
    graph made for one backend must never run for another.

    Raises:
        SettingError: the backend that was asked for cannot run here.
    """
    name = settings.backend(vllm_config.additional_config)
    if name == "cpp" and not host.on_cpu():
        raise SettingError("the cpp backend runs on CPU only; choose the torch backend.")
    if host.batch_invariant():
        name = _invariant(name)
    if name == settings.AUTO:
        name = _fastest()
    try:
        backend = backends.load(name)
    except BackendError as error:
        raise SettingError(str(error)) from None
    engine_config.set_additional(vllm_config, settings.BACKEND_KEY, name)
    return name, backend


def _invariant(asked: str) -> str:
    if host.on_cpu():
        raise SettingError(
            "VLLM_BATCH_INVARIANT is set, and vLLM's kernels for it are for GPUs; unset it."
        )
    if asked not in ("triton", settings.AUTO):
        raise SettingError(
            f"VLLM_BATCH_INVARIANT is set, which the {asked} backend does not heed; choose the "
            "triton backend."
        )
    return "triton"


def _fastest() -> str:
    if not host.on_cpu():
        return "torch"
    problem = None
    try:
        backends.load("cpp")
    except BackendError as error:
        problem = str(error)
    if decoder.all_workers(problem is None):
        return "cpp"
    host.logger().warning(
        "AttnRes runs on the slower torch backend: %s",
        problem or "another worker could not load the cpp backend.",
    )
    return "torch"
