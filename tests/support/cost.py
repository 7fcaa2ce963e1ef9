"""What a refusal costs, against the least that a start costs."""

import functools
import re
import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage

PHASE = re.compile(r" *\d+\.\d s  \w")


def python(*words: object) -> tuple[int, str, float]:
    """Run Python: its status, what it wrote to stderr and its seconds of processor time.

    Not the wall's, which other processes of this machine would lengthen.
    """
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    after = getrusage(RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stderr, spent


def command(*words: object) -> tuple[int, str, float]:
    """The same of attnres-serve, without the phases that it tells on a machine that is slow."""
    status, err, seconds = python("-m", "attnres_serve", *words)
    lines = err.splitlines(keepends=True)
    return status, "".join(line for line in lines if not PHASE.match(line)), seconds


@functools.cache
def of_a_start() -> float:
    """Seconds of processor time that the import of torch takes, with which every start begins.

    On a slow machine it is slow too.
    """
    return python("-c", "import torch")[2]
