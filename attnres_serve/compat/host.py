"""The installed vLLM: its log and its mode.

vLLM itself is imported inside the functions, so that a module can be imported without it.
"""

from logging import Logger

from attnres_serve.start import events


def logger() -> Logger:
    """A logger below vLLM's, the only ones that its logging configuration shows.

    While an engine starts, its warnings are also told to whoever began it.
    """
    from vllm.logger import init_logger

    log = init_logger("vllm.attnres_serve")
    log.addHandler(events.WARNINGS)  # anew: a configuration of logging drops it
    return log


def batch_invariant() -> bool:
    """Whether vLLM was asked that no answer depends on what else is in its batch."""
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT
