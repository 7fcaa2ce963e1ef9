"""Run as a script: a process that has imported what others wrote, and forks for every trial.

Importing torch and the like takes longer than most tests.  Nothing of the package or its tests is
imported here, so that each trial imports what the copied tree holds then; nor is vLLM, because with
it comes Triton, for which conftest.py chooses the interpreter before its import.
"""

import importlib
import json
import os
import sys

OTHERS = (
    *("torch", "hypothesis", "numpy", "safetensors.torch", "transformers"),
    *("fastapi.testclient", "httpx", "openai", "uvicorn", "matplotlib", "tqdm"),
)


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as conftest.py does, before torch comes
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it, and not this folder
    for name in OTHERS:
        importlib.import_module(name)
    import pytest

    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = pytest.main(asked["arguments"])
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


main()
