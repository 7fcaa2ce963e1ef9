"""The installed vLLM: its logger and its mode.

vLLM is imported inside the functions, so that this module can be imported without it.
"""

from logging import Logger

from attnres_serve.start import events


def logger() -> Logger:
    """A logger below vLLM's, because vLLM's logging configuration shows no others.

    While an engine starts, its warnings are also sent as events.
    """
    from vllm.logger import init_logger

    log = init_logger("vllm.attnres_serve")
    log.addHandler(events.WARNINGS)  # again, because configuring logging removes it
    return log


def batch_invariant() -> bool:
    """Whether vLLM's batch-invariant mode is on."""
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT
