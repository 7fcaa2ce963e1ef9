"""Edits of depth attention that take the place of others in a running engine.

All workers change, or none: where one fails, all of them get the old edits back.  An engine whose
workers may have different edits serves nothing until a change succeeds.
"""

import time
from typing import Any

from attnres_serve import settings
from attnres_serve.compat import engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds import replaced_weights, replacing_calls
from attnres_serve.compat.workarounds.replacing_calls import EDITS, NotWholeError, set_problem
from attnres_serve.depth import static_edits
from attnres_serve.depth.edits import Edit
from attnres_serve.errors import SettingError, first_line

FLAG = "--enable-attnres-edits"
_SERVED, _MARK = "attn_res_served_edits", "attn_res_edits_mark"  # of an engine


def check_start(vllm_config: Any) -> None:
    """Raise SettingError for an engine whose edits shall change but cannot."""
    if not settings.edits_change(vllm_config.additional_config):
        return
    problem = replaced_weights.fixed(vllm_config)
    if problem is None and not engine_config.has_worker_extension(vllm_config):
        problem = "whose workers have another extension by --worker-extension-cls"
    if problem is not None:
        raise SettingError(
            f"edits cannot change in a running engine {problem}; leave out {FLAG}, or "
            "--importance, which needs it."
        )


def served(engine: Any) -> list[Edit]:
    """The edits of the engine behind a client."""
    edits: list[Edit] | None = getattr(engine, _SERVED, None)
    return (settings.edits(engine.vllm_config.additional_config) or []) if edits is None else edits


async def change(engine: Any, edits: list[Edit]) -> None:
    """Serve under other edits, which the model can have; no request runs.

    Raises:
        SettingError: a worker failed; the old edits are served.
        NotWholeError: another one kept the new ones; nothing is served.
        OrderError: a request runs.
    """
    async with replacing_calls.turn(engine), replacing_calls.still(engine):
        try:
            why, left = await _exchange(engine, edits)
        except BaseException:  # a caller that has gone; no request is refused before that
            set_problem(engine, EDITS, "a change did not end")
            raise
        set_problem(engine, EDITS, left and why)
        if why is not None:
            raise (NotWholeError if left else SettingError)(why)


async def _exchange(engine: Any, edits: list[Edit]) -> tuple[str | None, str | None]:
    """Why workers did not change, and then why they did not get their old edits back."""
    before, mark = served(engine), getattr(engine, _MARK, "")
    if (why := await _ask(engine, edits)) is not None:
        return why, await _ask(engine, before)  # other workers may have changed
    version = (await engine.get_weight_version()).removesuffix(mark)
    setattr(engine, _SERVED, edits)
    setattr(engine, _MARK, f"+edits.{int(mark.rpartition('.')[2] or 0) + 1}")
    await engine.update_weight_version(version)
    setattr(engine, replacing_calls.CHANGED, time.time())
    return None, None


async def _ask(engine: Any, edits: list[Edit]) -> str | None:
    """The first problem of a worker; None if all of them have the edits."""
    try:
        sent = static_edits.to_json(edits)
        answers = await engine.collective_rpc("attn_res_change_edits", args=(sent,))
    except Exception as error:
        return f"a call did not end, so what workers have is unknown: {first_line(error)}"
    return next((answer for answer in answers if answer is not None), None)


def _marking(update: Any) -> Any:
    async def update_weight_version(self, new_version):
        await update(self, new_version + getattr(self, _MARK, ""))

    return update_weight_version


PATCH = Patch(
    targets=("vllm.v1.engine.async_llm:AsyncLLM.update_weight_version",),
    make=_marking,
    why="a version of weights says how often edits changed, too; no fault",
    models="AttnRes models",
    first=replaced_weights.SINCE,
)
