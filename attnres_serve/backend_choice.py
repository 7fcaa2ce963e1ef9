"""Which backend computes the sites of this worker."""

from types import ModuleType

from attnres_serve import compat, settings
from attnres_serve.errors import SettingError
from attnres_serve.kernels import backends


def choose(vllm_config) -> tuple[str, ModuleType]:
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
    if name == "cpp" and not compat.on_cpu():
        raise SettingError("the cpp backend runs on CPU only; choose the torch backend.")
    if compat.batch_invariant():
        name = _invariant(name)
    if name == settings.AUTO:
        name = _fastest()
    try:
        backend = backends.load(name)
    except backends.BackendError as error:
        raise SettingError(str(error)) from None
    compat.set_additional(vllm_config, settings.BACKEND_KEY, name)
    return name, backend


def _invariant(asked: str) -> str:
    if compat.on_cpu():
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
    if not compat.on_cpu():
        return "torch"
    problem = None
    try:
        backends.load("cpp")
    except backends.BackendError as error:
        problem = str(error)
    if compat.all_workers(problem is None):
        return "cpp"
    compat.logger().warning(
        "AttnRes runs on the slower torch backend: %s",
        problem or "another worker could not load the cpp backend.",
    )
    return "torch"
