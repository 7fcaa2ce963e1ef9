"""Tests of the triton backend in a process of their own, in Triton's interpreter."""

import os
import subprocess
import sys

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))  # whether this is such a process


def run_tests(*words: str) -> str:
    """Run tests in the interpreter; they must pass.

    Args:
        words: what is given to pytest.

    Returns:
        What pytest printed.
    """
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stdout[-6000:]
    return child.stdout
