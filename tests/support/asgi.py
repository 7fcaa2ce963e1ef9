"""Ask an ASGI app as a client that keeps to no rule: any path, any chunks, gone at any time."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Headers = Iterable[tuple[str, str]]


@dataclass
class Answer:
    """What came back until the app was done; no status if nothing did."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    taken: int = 0  # bytes of the request's body that the app asked for

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One request.

    Args:
        chunks: of the body; between them the app may do something else.
        stays: whether the client waits after them; else it is gone.
    """

    def __init__(
        self,
        method: str,
        path: str,
        headers: Headers = (),
        chunks: Iterable[bytes] = (b"{}",),
        ends: bool = True,
        stays: bool = True,
        root_path: str = "",
        query: str = "",
    ) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 50000),
            "method": method,
            "root_path": root_path,
            "path": path,
            "raw_path": path.encode(errors="replace"),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
        }
        self.chunks = list(chunks) or [b""]
        self.ends = ends
        self.gone = asyncio.Event()
        if not stays:
            self.gone.set()
        self.started = asyncio.Event()
        self.answer = Answer()

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.chunks:
            chunk = self.chunks.pop(0)
            self.answer.taken += len(chunk)
            more = bool(self.chunks) or not self.ends
            return {"type": "http.request", "body": chunk, "more_body": more}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            self.started.set()

    async def ask(self, app) -> Answer:
        await app(self.scope, self.receive, self.send)
        return self.answer


def ask(app, method: str, path: str, headers: Headers = (), **options: Any) -> Answer:
    """One request to an app, in an event loop of its own."""

    async def run() -> Answer:
        return await asyncio.wait_for(Client(method, path, headers, **options).ask(app), 30)

    return asyncio.run(run())
