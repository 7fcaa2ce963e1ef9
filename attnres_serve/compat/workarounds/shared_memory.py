"""vLLM's shared memory of CPU workers, whose names outlive a kill."""

from contextlib import suppress
from pathlib import Path


def forget_shared_memory() -> None:
    """Take the names of the memory that CPU workers share, once all of them have it mapped.

    vLLM does so at an orderly end only; after a kill the files would stay in /dev/shm.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    for group in (get_tp_group(), get_pp_group()):
        shared = getattr(group.device_communicator, "dist_module", None)
        name = getattr(shared, "group_name", None)
        if name is not None:
            with suppress(OSError):  # no such folder on this system, or not ours
                for path in Path("/dev/shm").iterdir():
                    if path.name.startswith(f"{name}_"):
                        path.unlink(missing_ok=True)
