"""Headers within bounds, byte by byte, through uvicorn without vLLM's app."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import pytest
import uvicorn
from raw_http import connected, read

pytest.importorskip("vllm")

from attnres_serve.server.bounds.headers import BoundedHeaders

SIZE, NUMBER = 2**16, 256
END = b"\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


async def app(scope, receive, send) -> None:
    """The size of what it is sent."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    said = b"%d headers, %d bytes\n" % (len(scope["headers"]), size)
    head = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = {"http": BoundedHeaders, "lifespan": "off", "log_level": "error"}
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **options)
    config.h11_max_incomplete_event_size, config.h11_max_header_count = SIZE, NUMBER
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def get(headers: bytes = b"", path: bytes = b"/") -> bytes:
    return b"GET %s HTTP/1.1\r\nhost: a%s" % (path, headers) + END


MANY = b"\r\nx: a" * NUMBER


@pytest.mark.parametrize(
    "asked",
    [
        get(b"\r\nx: " + b"a" * 2**20),
        get(b"\r\n" + b"x" * 2**20 + b": a"),
        get(b"\r\nx: %s" % (b"a" * 1000) * 1000),
        get(path=b"/" + b"a" * 2**20),
        get(MANY),
        CHUNKED + b"0\r\nx: " + b"a" * 2**20 + END,
        CHUNKED + b"0" + MANY + END,
        CHUNKED + b"1;" + b"a" * 2**20 + b"\r\na\r\n0" + END,
        get() + get(b"\r\nx: " + b"a" * 2**20),
    ],
    ids=["value", "name", "sum", "path", "number", "trailer", "trailers", "extension", "second"],
)
@pytest.mark.parametrize("piece", [2**16, 1000])
def test_what_is_too_much_ends_the_connection(url, asked, piece):
    sent = 0
    with connected(url) as connection, suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sent < len(asked):
            sent += connection.send(asked[sent : sent + piece])
            time.sleep(0.0005)  # so that the server reads pieces, and no heap of them
        connection.shutdown(socket.SHUT_WR)
        *_, answer = read(connection).split(b"HTTP/1.1 ")
        assert answer.startswith(b"400 ") and b"connection: close" in answer
    with connected(url) as connection:
        connection.sendall(get())
        assert b" 200 " in connection.recv(2**16)


def test_what_is_within_the_bounds_is_served(url):
    """One request after the other on a connection, and bodies of any size in any pieces."""
    large = b"a" * 300_000
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in large[:30_000])
    asked = [
        (get(b"\r\nx: a" * (NUMBER - 1)), b"256 headers, 0 bytes"),
        (get(b"\r\nx: " + b"a" * (SIZE - 100)), b"2 headers, 0 bytes"),
        (b"POST / HTTP/1.1\r\ncontent-length: 300000\r\n\r\n" + large, b"1 headers, 300000 bytes"),
        (CHUNKED + pieces + b"0" + END, b"2 headers, 30000 bytes"),
        (get(), b"1 headers, 0 bytes"),
    ]
    with connected(url) as connection, connection.makefile("rb") as answers:
        for request, said in asked * 2:
            connection.sendall(request)
            assert b" 200 " in answers.readline()
            while answers.readline() != b"\r\n":
                pass
            assert answers.readline() == said + b"\n"
