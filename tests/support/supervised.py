"""A process under the supervisor, in the place of a server."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

URL = "http://127.0.0.1:8000"
ASK = "curl"
READY = {"url": URL, "socket": None, "ask": ASK, "problem": None}


SUPERVISED = """
import os, sys, time
from attnres_serve.start import events
from attnres_serve.server.start import supervisor

def run():
    exec(sys.argv[1])
    return 0

sys.exit(supervisor.supervise(["serve"], run))
"""

CHECKED = "events.tell('checked', title='t', log=0, headless=0, socket=None); "


@contextmanager
def begun(words: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process whose output is read, and which is gone at the end."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def supervised(script: str) -> list[str]:
    """A command that supervises a script in the place of a server."""
    return [sys.executable, "-c", SUPERVISED, script]
