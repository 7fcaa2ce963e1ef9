"""The forward passes of the served model, which its workers count."""

import asyncio
from typing import Any

from attnres_serve.compat import engine_config, host, requests
from attnres_serve.server import metrics
from attnres_serve.server.routes.weights import weights_of

PERIOD = 10  # seconds between two calls of the workers for their forward passes


async def executed(client) -> dict[str, dict[str, int]]:
    """Forward passes since the start by algorithm and mode; updates ``/metrics``."""
    passes = await ask_first_worker(client, "attn_res_executed") or {}
    if engine_config.is_first_api_server(client.vllm_config):  # each server would count all passes
        metrics.count_passes(passes)
    return passes


async def keep_counting(client) -> None:
    """Call the workers from time to time, so that scrapes do not wait for them."""
    failing = False
    while not client.errored:
        try:
            await executed(client)
            await weights_of(client)
            failing = False
        except Exception as error:  # the next call may succeed
            if not failing and not client.errored:  # ``lifecycle`` handles a dead engine
                host.logger().warning("AttnRes: forward passes are not counted: %s", error)
            failing = True
        await asyncio.sleep(PERIOD)


async def ask_first_worker(client, method: str) -> Any:
    """The result of a method of ``worker.WorkerExtension``.

    None if a user's extension replaced the class, and while the engine sleeps: the memory of a
    sleeping model cannot be read.
    """
    if not engine_config.has_worker_extension(client.vllm_config) or await requests.is_asleep(
        client
    ):
        return None
    # All workers run every pass with the same settings, so the first one suffices.
    return (await requests.ask_workers(client, method))[0]
