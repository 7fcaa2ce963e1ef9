"""What scripts answer in processes that have imported vLLM and nothing of ours.

To import vLLM takes seconds, so one process does, and each script runs in a fork of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

FORKS = """
import json, os, sys
import vllm.transformers_utils.config
for script in json.loads(sys.argv.pop(1)):
    if not os.fork():
        exec(script)
        print("\\nANSWER" + json.dumps(answer), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def answers(scripts: Iterable[str], *arguments: object, **env: str) -> list[Any]:
    """What each script calls ``answer``, one after the other.

    Args:
        scripts: the sources.
        arguments: their ``sys.argv[1:]``.
        env: variables beside those of this process.
    """
    child = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps([*scripts]), *map(str, arguments)],
        env=os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    lines = child.stdout.splitlines()
    return [json.loads(line.removeprefix("ANSWER")) for line in lines if line.startswith("ANSWER")]
