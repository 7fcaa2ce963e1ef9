"""Clients that ask the demo's server all the time, some of whom leave, and its memory meanwhile."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import httpx
import numpy as np
import psutil

SITES = range(17)  # of the demo
SAMPLE = 1.0  # seconds between two looks at the memory


@dataclass
class Tally:
    """What the clients met."""

    answered: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def __add__(self, more: "Tally") -> "Tally":
        both = (self.answered + more.answered, self.left + more.left)
        return Tally(*both, self.errors + more.errors)


class Left(Exception):
    """A client left before its answer was complete."""


class Problem(Exception):
    """An answer that should not be."""


def load(url: str, clients: int, seconds: float, headers: dict[str, str] | None = None) -> Tally:
    """Ask by many clients at once; a third of the requests is left in the middle of its answer."""
    return asyncio.run(_load(url, clients, seconds, headers or {}))


async def _load(url: str, clients: int, seconds: float, headers: dict[str, str]) -> Tally:
    tally = Tally()
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=limits, headers=headers
    ) as client:
        await asyncio.gather(*(_client(client, end, tally) for _ in range(clients)))
    return tally


async def _client(client: httpx.AsyncClient, end: float, tally: Tally) -> None:
    while time.monotonic() < end:
        leaves = random.random() < 1 / 3
        try:
            await random.choices(WAYS, SHARES)[0](client, leaves)
            tally.answered += 1
        except Left:
            tally.left += 1
        except (httpx.HTTPError, Problem) as error:
            tally.errors[repr(error)] += 1


def _request() -> tuple[str, dict]:
    """A completion or a chat."""
    most = {"temperature": 0.8, "max_tokens": random.randrange(16, 64), "ignore_eos": True}
    if random.random() < 0.3:
        messages = [{"role": "user", "content": "def f(x):\n" * random.randrange(1, 20)}]
        return "/v1/chat/completions", {"messages": messages, **most}
    prompt = [random.randrange(3, 2000) for _ in range(random.randrange(1, 200))]
    return "/v1/completions", {"prompt": prompt, **most}


async def _streamed(client: httpx.AsyncClient, leaves: bool) -> None:
    path, body = _request()
    wanted = random.randrange(1, 12) if leaves else None
    lines = 0
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise Problem(f"{answer.status_code} {(await answer.aread()).decode()}")
        line = ""
        async for line in answer.aiter_lines():
            if line.startswith('data: {"error"'):
                raise Problem(line)
            if line == "data: [DONE]":
                return
            lines += line.startswith("data: ")
            if lines == wanted:
                raise Left
        raise Problem(f"a stream ended with {line!r}")


async def _whole(client: httpx.AsyncClient, leaves: bool) -> None:
    await _posted(client, leaves, *_request())


async def _traced(client: httpx.AsyncClient, leaves: bool) -> None:
    """A trace, of an answer or of a prompt alone; who leaves a long one does not see its end."""
    prompt = [random.randrange(3, 2000) for _ in range(random.randrange(1, 200))]
    answer = random.choice([0, 400]) if leaves else random.randrange(32)
    body = {"prompt": prompt, "max_tokens": answer, "sites": random.sample(SITES, 3)}
    await _posted(client, leaves, "/v1/attn_res/trace", body)


async def _posted(client: httpx.AsyncClient, leaves: bool, path: str, body: dict) -> None:
    asked = client.post(path, json=body)
    if leaves:
        asked = asyncio.wait_for(asked, random.uniform(0.01, 0.3))
    try:
        answer = await asked
    except TimeoutError:
        raise Left from None
    if answer.status_code != 200:
        raise Problem(f"{answer.status_code} {answer.text}")


WAYS, SHARES = (_streamed, _whole, _traced), (2, 2, 1)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def memory(pid: int) -> dict[str, float]:
    """MiB of a process and of each that it started, what they share counted once.

    Without the files that they map: of those a process has the less, the more others map them.
    """
    found = {}
    for process in tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):  # it has ended
            said = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes = re.findall(r"Pss_(?:Anon|Shmem): +(\d+) kB", said)
            found[f"{process.name()} {process.pid}"] = sum(map(int, sizes)) / 1024
    return found


@contextmanager
def watched_memory(pid: int) -> Iterator[list[tuple[float, dict[str, float]]]]:
    """Rows of seconds and MiB by process, which grow while the block runs."""
    rows: list[tuple[float, dict[str, float]]] = []
    stop, begin = Event(), time.monotonic()

    def watch() -> None:
        while not stop.wait(SAMPLE):
            rows.append((time.monotonic() - begin, memory(pid)))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield rows
    finally:
        stop.set()
        thread.join()


def slopes(rows: list[tuple[float, dict[str, float]]], after: float) -> dict[str, float]:
    """MiB per minute by process, of a line through what was seen after so many seconds."""
    late = [row for row in rows if row[0] > after]
    minutes = [seconds / 60 for seconds, _ in late]
    return {
        name: float(np.polyfit(minutes, [sizes.get(name, 0.0) for _, sizes in late], 1)[0])
        for name in late[-1][1]
    }
