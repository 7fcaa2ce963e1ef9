"""Requests and changes take turns."""

import asyncio
from typing import Any

import pytest

from attnres_serve.server.turns import Turns

pytestmark = pytest.mark.anyio


class Case:
    """An app whose requests end when they are told to."""

    def __init__(self) -> None:
        self.turns, self.end = Turns(), asyncio.Event()
        self.begun: list[str] = []
        self.app = self.turns.wrap(self._answer)

    async def _answer(self, asked: Any, receive: Any, send: Any) -> None:
        self.begun.append(asked["path"])
        await self.end.wait()

    def ask(self, path: str, method: str = "POST") -> asyncio.Task[None]:
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        answer: Any = self.app(scope, None, None)  # type: ignore[arg-type]
        return asyncio.ensure_future(answer)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_change_waits_for_requests_and_they_for_it() -> None:
    case, order = Case(), []

    async def change(name: str) -> None:
        async with case.turns.change(5):
            order.append(f"begin {name}")
            await asyncio.sleep(0)
            order.append(f"end {name}")

    first = case.ask("/first")
    await settle()
    changes = [asyncio.ensure_future(change(name)) for name in "ab"]
    await settle()
    later = case.ask("/later")
    beside = [case.ask("/v1/attn_res", "GET"), case.ask("/resume")]
    await settle()
    assert order == [] and case.begun == ["/first", "/v1/attn_res", "/resume"]
    case.end.set()
    await asyncio.gather(first, later, *beside, *changes)
    assert order == ["begin a", "end a", "begin b", "end b"] and case.begun[-1] == "/later"


async def test_a_change_that_gives_up_lets_requests_go_on() -> None:
    case = Case()
    case.ask("/first")
    await settle()
    with pytest.raises(TimeoutError):
        async with case.turns.change(0):
            raise AssertionError("a request runs")
    case.ask("/second")
    await settle()
    assert case.begun == ["/first", "/second"]
    with pytest.raises(TimeoutError):
        async with case.turns.change(0.01):
            raise AssertionError("requests run")


async def test_a_change_waits_for_another_no_longer_than_it_says() -> None:
    async def enter(turns: Turns, seconds: float) -> None:
        async with turns.change(seconds):
            pass

    turns = Turns()
    async with turns.change(0):
        with pytest.raises(TimeoutError):
            await asyncio.create_task(enter(turns, 0.01))
        await asyncio.sleep(0.02)  # what has begun is not cut off
    await enter(turns, 0)
