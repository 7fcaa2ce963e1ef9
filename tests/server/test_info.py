"""Asking the workers for their passes from time to time: without an engine."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from attnres_serve.compat import host
from attnres_serve.server.routes import info


def test_a_failure_is_said_once_and_counting_goes_on(monkeypatch):
    """It fails three times, goes well, fails once more: two warnings; then the engine is dead."""
    client = SimpleNamespace(errored=False)
    said: list[str] = []
    left = [1, 2, 3, None, 5, "dead"]

    async def executed(_):
        answer = left.pop(0)
        if answer == "dead":
            client.errored = True
        if answer is not None:
            raise RuntimeError(f"no answer ({answer})")

    logger = logging.Logger("of this test")
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(host, "logger", lambda: logger)
    monkeypatch.setattr(info, "executed", executed)
    monkeypatch.setattr(info, "PERIOD", 0)
    asyncio.run(info.keep_counting(client))
    assert left == []
    assert said == [
        f"AttnRes: forward passes are not counted: no answer ({number})" for number in (1, 5)
    ]
