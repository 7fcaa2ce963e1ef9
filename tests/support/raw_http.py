"""Requests byte by byte, where clients would tidy up or wait."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import httpx


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection to a server, which waits a minute for what it reads."""
    parts = httpx.URL(url)
    with closing(socket.create_connection((parts.host, parts.port), timeout=60)) as connection:
        yield connection


def read(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def half_sent(url: str, path: str, body: bytes, key: str = "none") -> Iterator[Callable[[], bytes]]:
    """A request that has begun and runs until the rest of its body is sent.

    Yields:
        A function that sends the rest and returns the answer.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {httpx.URL(url).host}\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with connected(url) as connection:
        connection.sendall(head.encode() + body[:-1])

        def rest() -> bytes:
            connection.sendall(body[-1:])
            return read(connection)

        yield rest
