"""Names of vLLM's shared memory of CPU workers, which survive a kill."""

from contextlib import suppress
from pathlib import Path


def forget_shared_memory() -> None:
    """Unlink the shared memory of CPU workers after all of them have mapped it.

    vLLM does this only at an orderly end; after a kill the files would stay in /dev/shm.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    for group in (get_tp_group(), get_pp_group()):
        shared = getattr(group.device_communicator, "dist_module", None)
        name = getattr(shared, "group_name", None)
        if name is not None:
            with suppress(OSError):  # the folder does not exist, or belongs to another user
                for path in Path("/dev/shm").iterdir():
                    if path.name.startswith(f"{name}_"):
                        path.unlink(missing_ok=True)
