"""Replacing weights in a running engine: the part before and after the calls of workers.

vLLM 0.32 empties the prefix cache only in ``/pause`` and ``sleep``, so prompts may be answered from
a cache of old weights.  A worker cannot reach that cache.  Here it is emptied before every call
that changes weights, no request may run during one, and an engine whose weights are not whole
serves nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from attnres_serve.compat import device, engine_config, tensor_file
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.renewal import DRAFT, TARGET
from attnres_serve.compat.workarounds.replaced_weights import (
    FILE,
    FINISH,
    FROM_ENGINE,
    PIECE,
    RELOAD,
    SHUTDOWN,
    SINCE,
    START,
    START_DRAFT,
    STEPS,
    WAY,
    WHY,
    problem,
)
from attnres_serve.errors import SettingError, first_line

# Other methods of vLLM's workers that change weights.
OTHERS = ("load_model", "reset_weights", "update_config")
EDITS = "edits"  # may differ between workers, like the weights of TARGET and DRAFT
TRACE = "attn_res_trace"  # runs the model like a request
CHANGING = (RELOAD, FINISH)
_ARGUMENTS = ("weights_iterator", "weights_path", "is_checkpoint_format", "is_partial")  # of RELOAD
BUSY = (
    "weights cannot be replaced while requests run, which would be answered by both; wait for "
    "them, abort them, or pause them."
)
# Attributes of an engine: the problems of TARGET, DRAFT or EDITS; the step that began an update;
# the time of the last change; the lock that serialises calls.
_PROBLEMS, _STARTED = "attn_res_weights_problems", "attn_res_weights_started"
CHANGED, _TURN = "attn_res_weights_changed", "attn_res_weights_turn"


class OrderError(SettingError):
    """A step of an update came at the wrong time."""


class NotWholeError(SettingError):
    """The weights of an engine are not whole."""


def _asking(original: Any) -> Any:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if not _is_ours(self, method):
            answers = original(self, method, timeout, args, kwargs)
            if method == TRACE:  # an update before it may have failed since it was sent
                check_whole(self)
            return answers
        _check_order(self, method)
        with _worker_arguments(self, method, args, kwargs) as (args, kwargs):
            if method in CHANGING:
                _require_idle(self)
                _require_empty(self.reset_prefix_cache())
            with _known(self):
                answers = original(self, method, timeout, args, kwargs)
                if _is_update_over(method, answers):
                    original(self, SHUTDOWN, timeout, (), {})
            return _read(self, method, answers)

    return collective_rpc


def _asking_async(original: Any) -> Any:
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if not _is_ours(self, method):
            answers = await original(self, method, timeout, args, kwargs)
            if method == TRACE:  # an update before it may have failed since it was sent
                check_whole(self)
            return answers

        async def ask(args, kwargs):
            with _known(self):
                answers = await original(self, method, timeout, args, kwargs)
                if _is_update_over(method, answers):
                    await original(self, SHUTDOWN, timeout, (), {})
            return _read(self, method, answers)

        async with turn(self):
            _check_order(self, method)
            with _worker_arguments(self, method, args, kwargs) as arguments:
                if method not in CHANGING:
                    return await ask(*arguments)
                async with still(self):
                    return await ask(*arguments)

    return collective_rpc


def turn(engine: Any) -> asyncio.Lock:
    """The lock that a call holds, so that no other runs between its parts."""
    lock: asyncio.Lock = vars(engine).setdefault(_TURN, asyncio.Lock())
    return lock


@asynccontextmanager
async def still(engine: Any) -> AsyncIterator[None]:
    """A context without running requests; afterwards none run on weights that are not whole.

    Paused requests restart, and keep nothing of the old weights.
    """
    is_paused = await engine.is_paused()
    if not is_paused:
        _require_idle(engine)
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    try:
        _require_empty(await engine.reset_prefix_cache(reset_running_requests=is_paused))
        if not is_paused:
            _require_idle(engine)  # no request came meanwhile
        yield
    finally:
        if why_not_whole(engine) is not None:
            waiting = engine.output_processor
            await engine.abort([*waiting.request_states, *waiting.parent_requests], internal=True)
        if not is_paused:
            await engine.engine_core.resume_scheduler_async()


@contextmanager
def _known(engine: Any) -> Iterator[None]:
    """Record that weights are unknown if workers do not answer."""
    try:
        yield
    except BaseException as error:
        setattr(engine, _STARTED, None)
        reason = f"a call did not end, so what workers have is unknown: {first_line(error)}"
        set_problem(engine, TARGET, reason)
        raise


def _is_ours(engine: Any, method: Any) -> bool:
    """Whether a call replaces the weights of an AttnRes model, or is a step of that.

    Raises:
        SettingError: the engine would have other weights than it reports.
    """
    if not engine_config.has_attn_res(engine.vllm_config):
        return False
    if method in OTHERS:
        raise SettingError(f"{method} is not supported with AttnRes while an engine runs; {WAY}")
    if method not in (RELOAD, *STEPS):
        if method == TRACE:
            check_whole(engine)
        return False
    if (sentence := problem(engine.vllm_config)) is not None:
        raise SettingError(sentence)
    if method != RELOAD and engine.vllm_config.weight_transfer_config is None:
        raise SettingError(
            f"{method} needs an engine that receives weights; start it with "
            '--weight-transfer-config \'{"backend": "shared_memory"}\', or call reload_weights.'
        )
    return True


def _check_order(engine: Any, method: str) -> None:
    """Raise OrderError for a step at the wrong time.  A new start discards an earlier one."""
    is_started = getattr(engine, _STARTED, None) is not None
    if method in (PIECE, FINISH) and not is_started:
        raise OrderError(f"{method} is for an update that was started; call {START} first.")
    if method == RELOAD and is_started:
        raise OrderError(
            f"{method} cannot come within an update; finish that one first, or give it up by "
            f"{SHUTDOWN}."
        )


@contextmanager
def _worker_arguments(
    engine: Any, method: str, args: Any, kwargs: Any
) -> Iterator[tuple[Any, Any]]:
    """The arguments for workers.  Tensors go to other processes in a file."""
    kwargs = dict(kwargs or {})
    if method == PIECE and any(isinstance(one, list) for one in (*args, *kwargs.values())):
        raise SettingError(
            "update_info is a list with an entry for each rank, which is not supported with "
            "AttnRes; give one object, as every worker reads the same file."
        )
    if method != RELOAD:
        yield args, kwargs
        return
    kwargs |= dict(zip(_ARGUMENTS, args, strict=False))
    if unknown := sorted(kwargs.keys() - {*_ARGUMENTS}):
        raise SettingError(
            f"{RELOAD} has no argument {unknown[0]}; it takes {', '.join(_ARGUMENTS)}."
        )
    kwargs[FROM_ENGINE] = True
    tensors = kwargs.get("weights_iterator")
    if tensors is None or _is_in_this_process(engine):
        yield (), kwargs
        return
    with tensor_file.file_of(kwargs.pop("weights_iterator")) as path:
        yield (), kwargs | {FILE: path}


def _is_in_this_process(engine) -> bool:
    """Whether an engine's only worker is in this process."""
    from vllm.v1.engine.core_client import InprocClient

    alone = engine.vllm_config.parallel_config.world_size == 1
    return alone and isinstance(engine.engine_core, InprocClient)


def _require_idle(engine: Any) -> None:
    if engine.output_processor.has_unfinished_requests():
        raise OrderError(BUSY)


def _require_empty(is_empty: bool) -> None:
    """Raise OrderError if the prefix cache could not be emptied, because a request uses it.

    It is emptied first, so that requests during the update are computed with the new weights.
    """
    if not is_empty:
        raise OrderError(BUSY)


def _is_update_over(method: str, answers: list[dict[str, Any]]) -> bool:
    """Whether a step was refused, so that the update must end in all workers."""
    return method in STEPS and any(answer["problem"] for answer in answers)


def _read(engine: Any, method: str, answers: list[dict[str, Any]]) -> list[None]:
    """Process the workers' answers.

    Raises:
        SettingError: the problem of one of them.
    """
    problem = next((answer["problem"] for answer in answers if answer["problem"]), None)
    replaced = DRAFT if getattr(engine, _STARTED, None) == START_DRAFT else TARGET
    if method in (START, START_DRAFT) and problem is None:
        setattr(engine, _STARTED, method)
    elif method != PIECE or problem is not None:  # a refusal ends an update
        setattr(engine, _STARTED, None)
    broken = {what for answer in answers for what in answer["broken"]}
    if method in CHANGING and len({answer["problem"] is None for answer in answers}) > 1:
        broken.add(replaced)  # only some workers have new weights
    before = getattr(engine, _PROBLEMS, {})
    if problem is not None:
        setattr(engine, _PROBLEMS, before | dict.fromkeys(broken, problem))
        raise (NotWholeError if broken else SettingError)(problem)
    if method in CHANGING:  # a draft head is replaced with its target
        mended = {replaced, DRAFT} - broken
        left = {what: why for what, why in before.items() if what not in mended}
        setattr(engine, _PROBLEMS, left)
        setattr(engine, CHANGED, time.time())
    return [None] * len(answers)


def set_problem(engine: Any, what: str, why: str | None) -> None:
    """Record why TARGET, DRAFT or EDITS are not whole; None if they are."""
    others = {one: reason for one, reason in getattr(engine, _PROBLEMS, {}).items() if one != what}
    setattr(engine, _PROBLEMS, others if why is None else others | {what: why})


def why_not_whole(engine: Any) -> str | None:
    """The reason why an engine serves nothing, in one sentence; None if its weights are whole."""
    for what, why in getattr(engine, _PROBLEMS, {}).items():
        if what == EDITS:
            return (
                f"the workers of this engine may have different edits, as changing them failed "
                f"({why}); no request is served until they were changed."
            )
        of = "the draft of " if what == DRAFT else ""
        return (
            f"the weights of {of}this engine are not whole, as replacing them failed ({why}); no "
            "request is served until all weights were replaced."
        )
    return None


def check_whole(engine: Any) -> None:
    """Raise NotWholeError for an engine whose weights are not whole."""
    if (sentence := why_not_whole(engine)) is not None:
        raise NotWholeError(sentence)


def _checking(original: Any) -> Any:
    """Check the weights when a request arrives, and again when it goes to the engine.

    An update may have failed in between.
    """

    def checked(self, *args, **kwargs):
        check_whole(self)
        return original(self, *args, **kwargs)

    return checked


def _adding_async(original: Any) -> Any:
    async def add_request(self, *args, **kwargs):
        check_whole(self)
        return await original(self, *args, **kwargs)

    return add_request


def _resuming(original: Any) -> Any:
    async def resume_generation(self):
        async with turn(self):
            check_whole(self)
            return await original(self)

    return resume_generation


def _sleeping(original: Any) -> Any:
    def sleep(self, level=1, *args, **kwargs):
        _check_sleep(self, level)
        return original(self, level, *args, **kwargs)

    return sleep


def _sleeping_async(original: Any) -> Any:
    async def sleep(self, level=1, *args, **kwargs):
        _check_sleep(self, level)
        return await original(self, level, *args, **kwargs)

    return sleep


def _check_sleep(engine: Any, level: int) -> None:
    """Raise SettingError for a sleep that frees nothing, or discards the weights."""
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
    Patch(targets=(target,), make=make, why=WHY, models="AttnRes models", first=first)
    for target, make, first in (
        ("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc", _asking, (0, 28)),
        ("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", _asking_async, (0, 28)),
        ("vllm.v1.engine.llm_engine:LLMEngine.add_request", _checking, (0, 28)),
        ("vllm.v1.engine.async_llm:AsyncLLM.add_request", _adding_async, (0, 28)),
        ("vllm.v1.engine.async_llm:AsyncLLM.check_admission", _checking, SINCE),
        ("vllm.v1.engine.async_llm:AsyncLLM.resume_generation", _resuming, SINCE),
        ("vllm.v1.engine.llm_engine:LLMEngine.sleep", _sleeping, (0, 28)),
        ("vllm.v1.engine.async_llm:AsyncLLM.sleep", _sleeping_async, (0, 28)),
    )
)
