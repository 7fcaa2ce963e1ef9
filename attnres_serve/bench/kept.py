"""Compiled code that is kept for the next run of ``bench`` on a checkpoint.

vLLM's key of compiled code includes the path of a model.  So the baseline always has the same path,
although its weights are written for every run and deleted after it.  The key of stock vLLM ignores
the processor, which differs if machines share a home directory.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from attnres_serve import cache_folder, output
from attnres_serve.errors import SettingError
from attnres_serve.kernels import fingerprint


@contextmanager
def caches(checkpoint: Path) -> Iterator[tuple[Path, Path]]:
    """The folder of a checkpoint's compiled code, and a free path for its baseline.

    It waits for another run on the same checkpoint.

    Args:
        checkpoint: the checkpoint's folder.

    Raises:
        SettingError: the folder cannot be made.
    """
    machine = fingerprint.processor(), os.environ.get("ATEN_CPU_CAPABILITY")
    name = sha256(f"{checkpoint.resolve()} {machine}".encode()).hexdigest()[:16]
    try:
        folder = cache_folder.made(f"bench/{name}")
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise SettingError(
            f"bench has no place for compiled code ({error}); set XDG_CACHE_HOME to a folder that "
            "can be written."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            output.say("wait for the end of another bench of this checkpoint")
            fcntl.flock(lock, fcntl.LOCK_EX)
        baseline = folder / "baseline"
        shutil.rmtree(baseline, ignore_errors=True)  # from a killed run
        try:
            yield folder, baseline
        finally:
            shutil.rmtree(baseline, ignore_errors=True)
