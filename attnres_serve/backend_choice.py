"""Which backend computes the sites of this worker."""

from types import ModuleType

from attnres_serve import compat, settings
from attnres_serve.errors import SettingError
from attnres_serve.kernels import backends


def choose(vllm_config) -> tuple[str, ModuleType]:
    """The backend by name and ready to run; ``auto`` is cpp on CPU where it can be compiled.

    The name is written back to ``additional_config``, which is part of vLLM's compile-cache key: a
    graph made for one backend must never run for another.

    Raises:
        SettingError: the backend that was asked for cannot run here.
    """
    name = settings.backend(vllm_config.additional_config)
    if name == "cpp" and not compat.on_cpu():
        raise SettingError("the cpp backend runs on CPU only; choose the torch backend.")
    try:
        chosen = ("cpp" if compat.on_cpu() else "torch") if name == settings.AUTO else name
        backend = backends.load(chosen)
    except backends.BackendError as error:
        if name != settings.AUTO:
            raise SettingError(str(error)) from None
        compat.logger().warning("AttnRes runs on the slower torch backend: %s", error)
        chosen, backend = "torch", backends.load("torch")
    compat.set_additional(vllm_config, settings.BACKEND_KEY, chosen)
    return chosen, backend
