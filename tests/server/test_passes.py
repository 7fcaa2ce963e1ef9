"""Asking the workers for their passes from time to time: without an engine."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from attnres_serve.server import passes


def test_a_failure_is_said_once_and_counting_goes_on(monkeypatch, warned):
    """It fails three times, goes well, fails once more: two warnings; then the engine is dead."""
    client = SimpleNamespace(errored=False)
    left = [1, 2, 3, None, 5, "dead"]

    async def executed(_):
        answer = left.pop(0)
        if answer == "dead":
            client.errored = True
        if answer is not None:
            raise RuntimeError(f"no answer ({answer})")

    monkeypatch.setattr(passes, "executed", executed)
    monkeypatch.setattr(passes, "PERIOD", 0)
    asyncio.run(passes.keep_counting(client))
    assert left == []
    assert warned == [
        f"AttnRes: forward passes are not counted: no answer ({number})" for number in (1, 5)
    ]
