"""Edits of depth attention that take the place of others in a running engine.

All workers change, or none: where one fails, all of them get the old edits back.  An engine whose
workers may have different edits serves nothing until a change succeeds.

A worker says what is wrong and never raises, as with weights (``workarounds.replaced_weights``).
"""

import time
from typing import Any, NamedTuple

from attnres_serve import settings
from attnres_serve.compat import device, engine_config, versions
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds import replacing_calls
from attnres_serve.compat.workarounds.replacing_calls import EDITS, NotWholeError
from attnres_serve.depth import static_edits
from attnres_serve.depth.edits import Edit
from attnres_serve.errors import SettingError, first_line

METHOD = "attn_res_change_edits"  # of ``worker.WorkerExtension``
FLAG = "--enable-attnres-edits"
SINCE = (0, 32)
_SERVED = "attn_res_served_edits"  # of an engine


class Served(NamedTuple):
    """What a model is served under.

    Attributes:
        edits: in the order in which they are applied.
        changes: how often they were changed since the start.
    """

    edits: list[Edit]
    changes: int

    @property
    def mark(self) -> str:
        """What the version of the weights ends with."""
        return f"+edits.{self.changes}" if self.changes else ""


def check_start(vllm_config: Any) -> None:
    """Raise SettingError for an engine whose edits are to change and cannot."""
    if not settings.edits_change(vllm_config.additional_config):
        return
    reasons = {
        "on a GPU, where that was never tried": not device.is_cpu(),
        "in a vLLM before 0.32, with which that was not tried": versions.is_older_than(SINCE),
        "with a KV connector, which would keep what was computed under the old ones": (
            vllm_config.kv_transfer_config is not None
        ),
        "in several replicas": vllm_config.parallel_config.data_parallel_size > 1,
        # Each would know of its own changes alone.
        "behind several API servers": not engine_config.is_only_api_server(vllm_config),
    }
    if (found := next((reason for reason, is_so in reasons.items() if is_so), None)) is not None:
        raise SettingError(f"{FLAG}: edits cannot change {found}; leave the flag out.")


def served(engine: Any) -> Served:
    """The edits of an engine, by its client."""
    found: Served | None = getattr(engine, _SERVED, None)
    return found or Served(settings.edits(engine.vllm_config.additional_config), 0)


async def change(engine: Any, edits: list[Edit]) -> None:
    """Serve under other edits; no request runs.

    Args:
        engine: vLLM's client of it.
        edits: which the model can have.

    Raises:
        SettingError: a worker failed; the old edits are served.
        NotWholeError: another one kept the new ones, or the weights are not whole; nothing is.
        OrderError: a request runs.
    """
    async with replacing_calls.turn(engine):
        replacing_calls.check_whole(engine, but=EDITS)
        async with replacing_calls.still(engine):
            before = served(engine)
            replacing_calls.set_problem(engine, EDITS, "a change did not end")
            if (why := await _ask(engine, edits)) is not None:
                left = await _ask(engine, before.edits)  # others may have changed
                replacing_calls.set_problem(engine, EDITS, left and why)
                raise (NotWholeError if left else SettingError)(why)
            version = (await engine.get_weight_version()).removesuffix(before.mark)
            setattr(engine, _SERVED, Served(edits, before.changes + 1))
            await engine.update_weight_version(version)
            setattr(engine, replacing_calls.CHANGED, time.time())
            replacing_calls.set_problem(engine, EDITS, None)


async def _ask(engine: Any, edits: list[Edit]) -> str | None:
    """What a worker found to be wrong; None where all of them have the edits."""
    try:
        answers = await engine.collective_rpc(METHOD, args=(static_edits.to_json(edits),))
    except Exception as error:
        return f"a call did not end, so what workers have is unknown: {first_line(error)}"
    return next((answer for answer in answers if answer is not None), None)


def _marking(own: Any) -> Any:
    async def update_weight_version(self, new_version):
        """Let the version of the weights say which edits are served, too."""
        await own(self, new_version + served(self).mark)

    return update_weight_version


PATCH = Patch(
    targets=("vllm.v1.engine.async_llm:AsyncLLM.update_weight_version",),
    make=_marking,
    why="a version says which edits are served; no fault",
    models="AttnRes models whose edits may change",
    first=SINCE,
)
