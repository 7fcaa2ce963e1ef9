"""Scripts that start an engine whenever they are imported.

An engine's process imports the script that started it.  Without a guard the script would start
another engine, which Python refuses with a hundred lines about ``freeze_support``.
"""

import multiprocessing

SENTENCE = (
    "This script starts an engine while the process of its engine imports it; start it below "
    '`if __name__ == "__main__":`.'
)


def end_import(vllm_config) -> None:
    """End a process whose imported script starts another engine.

    Args:
        vllm_config: of that engine.

    Raises:
        SystemExit: with a sentence; the process that started this one reports the rest.
    """
    from vllm import envs

    starts_none = not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    if starts_none and vllm_config.parallel_config.world_size == 1:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # Python's check
        raise SystemExit(SENTENCE)
