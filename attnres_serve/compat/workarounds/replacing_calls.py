"""Calls of an engine that replace its weights: what happens before workers are asked, and after.

vLLM 0.32 empties the prefix cache in ``/pause`` and ``sleep`` alone, so that a prompt may be
answered by what old weights computed.  A worker cannot reach that cache.  Here it is emptied before
every call that changes weights, no request may run beside one, and an engine whose weights are not
whole serves nothing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnres_serve.compat import device, engine_config, tensor_file
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.replaced_weights import (
    ASKED,
    FILE,
    FINISH,
    INIT,
    RELOAD,
    SHUTDOWN,
    START,
    STEPS,
    WAY,
    WHY,
    problem,
)
from attnres_serve.errors import SettingError

# Methods of vLLM's workers that change weights in another way.
OTHERS = ("load_model", "reset_weights", "update_config")
TRACE = "attn_res_trace"  # runs the model, as a request does
_ARGUMENTS = ("weights_iterator", "weights_path", "is_checkpoint_format")  # of RELOAD, in order
BUSY = (
    "weights cannot be replaced while requests run, which would be answered by both; wait for "
    "them, abort them, or pause them."
)
# Of an engine: why its weights are not whole; whether an update was started; when the last ended.
_PROBLEM, _STARTED = "attn_res_weights_problem", "attn_res_weights_started"
CHANGED = "attn_res_weights_changed"


class OrderError(SettingError):
    """A step of an update comes when it cannot."""


def _asking(own: Any) -> Any:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if not _is_ours(self, method):
            return own(self, method, timeout, args, kwargs)
        with _given(self, method, args, kwargs) as (args, kwargs):
            if method in (RELOAD, FINISH):
                _require_idle(self)
                _require_empty(self.reset_prefix_cache())
            return _read(self, method, own(self, method, timeout, args, kwargs))

    return collective_rpc


def _asking_async(own: Any) -> Any:
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if not _is_ours(self, method):
            return await own(self, method, timeout, args, kwargs)
        with _given(self, method, args, kwargs) as (args, kwargs):
            if method in (RELOAD, FINISH):
                is_paused = await self.is_paused()
                if not is_paused:
                    _require_idle(self)
                # Requests that are paused begin again, and keep nothing of the old weights.
                _require_empty(await self.reset_prefix_cache(reset_running_requests=is_paused))
                if not is_paused:
                    _require_idle(self)  # no request came meanwhile
            return _read(self, method, await own(self, method, timeout, args, kwargs))

    return collective_rpc


def _is_ours(engine: Any, method: Any) -> bool:
    """Whether a call replaces the weights of an AttnRes model, or is a step on the way.

    Raises:
        SettingError: it would leave an engine with other weights than it says.
    """
    if not engine_config.has_attn_res(engine.vllm_config):
        return False
    if method in OTHERS:
        raise SettingError(f"{method} is not supported with AttnRes while an engine runs; {WAY}")
    if method not in (RELOAD, *STEPS):
        if method == TRACE:
            check_whole(engine)
        return False
    if (found := problem(engine.vllm_config)) is not None:
        raise SettingError(found)
    if method != RELOAD and engine.vllm_config.weight_transfer_config is None:
        raise SettingError(
            f"{method} needs an engine that receives weights; start it with "
            '--weight-transfer-config \'{"backend": "shared_memory"}\', or call reload_weights.'
        )
    _check_order(engine, method)
    return True


def _check_order(engine: Any, method: str) -> None:
    is_started = getattr(engine, _STARTED, False)
    if method in ("update_weights", FINISH):
        if not is_started:
            raise OrderError(f"{method} is for an update that was started; call {START} first.")
    elif is_started:
        raise OrderError(f"{method} cannot come within an update; finish that one first.")


@contextmanager
def _given(engine: Any, method: str, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments that workers get.  Tensors go to other processes in a file."""
    kwargs = dict(kwargs or {})
    if method != RELOAD:
        yield args, kwargs
        return
    kwargs |= dict(zip(_ARGUMENTS, args, strict=False)) | {ASKED: True}
    tensors = kwargs.get("weights_iterator")
    if tensors is None or engine_config.is_in_this_process(engine):
        yield (), kwargs
        return
    with tensor_file.file_of(kwargs.pop("weights_iterator")) as path:
        yield (), kwargs | {FILE: path}


def _require_idle(engine: Any) -> None:
    if engine.output_processor.has_unfinished_requests():
        raise OrderError(BUSY)


def _require_empty(is_empty: bool) -> None:
    """Raise SettingError where the prefix cache could not be emptied, as a request still has it.

    It is emptied first: what comes while weights are replaced is computed with the new ones.
    """
    if not is_empty:
        raise OrderError(BUSY)


def _read(engine: Any, method: str, answers: list[dict[str, Any]]) -> list[None]:
    """What workers answered.

    Raises:
        SettingError: with what one of them found to be wrong.
    """
    found = next((answer["problem"] for answer in answers if answer["problem"]), None)
    if method not in (INIT, SHUTDOWN):  # whatever is refused ends an update
        setattr(engine, _STARTED, found is None and method not in (RELOAD, FINISH))
    is_whole = all(answer["is_whole"] for answer in answers)
    some_are_new = method in (RELOAD, FINISH) and len({a["problem"] is None for a in answers}) > 1
    if not is_whole or some_are_new:
        setattr(engine, _PROBLEM, found)
    elif method in (RELOAD, FINISH) and found is None:
        setattr(engine, _PROBLEM, None)
        setattr(engine, CHANGED, time.time())
    if found is not None:
        raise SettingError(found)
    return [None] * len(answers)


def check_whole(engine: Any) -> None:
    """Raise SettingError for an engine whose weights are not whole."""
    if (found := getattr(engine, _PROBLEM, None)) is not None:
        raise SettingError(
            f"the weights of this engine are not whole, as replacing them failed ({found}); no "
            "request is served until all weights were replaced."
        )


def _adding(own: Any) -> Any:
    def add_request(self, *args, **kwargs):
        check_whole(self)
        return own(self, *args, **kwargs)

    return add_request


def _adding_async(own: Any) -> Any:
    async def add_request(self, *args, **kwargs):
        check_whole(self)
        return await own(self, *args, **kwargs)

    return add_request


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


def _check_sleep(engine: Any, level: int) -> None:
    """Raise SettingError for a sleep that frees nothing, or that discards the weights."""
    if level < 1 or not engine_config.has_attn_res(engine.vllm_config):
        return
    if device.is_cpu():
        raise SettingError(
            f"sleep level {level} frees no memory on a CPU; pause the engine, or stop it."
        )
    if level > 1:
        raise SettingError(
            f"sleep level {level} discards the weights, and an AttnRes model on a GPU does not get "
            "them back; use level 1, which keeps them."
        )


CLIENTS = tuple(
    Patch(targets=(target,), make=make, why=WHY, models="AttnRes models", first=(0, 28))
    for target, make in {
        "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": _asking,
        "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": _asking_async,
        "vllm.v1.engine.llm_engine:LLMEngine.add_request": _adding,
        "vllm.v1.engine.async_llm:AsyncLLM.add_request": _adding_async,
        "vllm.v1.engine.llm_engine:LLMEngine.sleep": _sleeping,
        "vllm.v1.engine.async_llm:AsyncLLM.sleep": _sleeping_async,
    }.items()
)
