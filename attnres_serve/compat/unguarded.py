"""A script that starts an engine wherever it is imported.

An engine's process imports the script that starts it.  Without a guard it would start one more
then, which Python refuses with a hundred lines about ``freeze_support``.
"""

import multiprocessing

SENTENCE = (
    "This script starts an engine while the process of its engine imports it; start it below "
    '`if __name__ == "__main__":`.'
)


def end_import(vllm_config) -> None:
    """End a process that begins by importing a script, which asks for an engine of its own.

    Args:
        vllm_config: the engine's.

    Raises:
        SystemExit: with a sentence, as whoever has started the process says the rest.
    """
    from vllm import envs

    starts_none = not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    if starts_none and vllm_config.parallel_config.world_size == 1:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # by what Python refuses
        raise SystemExit(SENTENCE)
