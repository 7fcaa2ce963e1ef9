"""Keys, hostile paths and bounds on a real server, byte by byte where clients would tidy up."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import httpx
import pytest
from demo_servers import CHUNK, KEY, SECOND, SEQUENCES, TRACE_TOKENS
from demo_servers import KEYED_CONTEXT as CONTEXT
from raw_http import connected, read

pytestmark = pytest.mark.engine

DEEP = json.loads('{"items": ' * 450 + "{}" + "}" * 450)
COMPLETION = {"model": "demo", "prompt": "def ", "max_tokens": 2}


@pytest.fixture(scope="module")
def client(server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        yield client


def error_of(answer: httpx.Response, status: int) -> str:
    """The message of an error of OpenAI's shape, in which nothing of the machine is named."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and error["type"] and error["message"]
    text = re.sub(r"https?://\S+", "", answer.text)  # of the request, or pydantic's documentation
    for leak in (r"/\w+/", r"0x[0-9a-f]{4}", r"\.py\b", "Traceback", r"File \"", "line [0-9]+, in"):
        assert not re.search(leak, text), text
    return error["message"]


# --- the key


@pytest.mark.parametrize("key", [KEY, SECOND], ids=["first", "second"])
def test_each_key_of_the_file_opens(server, key):
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{server.url}/v1/attn_res", headers=headers).json()["format"] == "house"
    asked = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, headers=headers, timeout=60)
    assert asked.json()["choices"][0]["text"]


def test_what_is_public_and_what_a_key_opens(server, client):
    """Mounts and vLLM's own routes too; none of them is for development, or for another site."""
    for path in ("/health", "/ping"):
        assert httpx.get(server.url + path).status_code == 200
    for path in ("/metrics", "/version", "/openapi.json", "/v1/models/demo", "/v1/attn_res"):
        assert httpx.get(server.url + path).status_code == 401
        assert client.get(path).status_code == 200
    assert client.post("/invocations", json=COMPLETION).json()["choices"]
    for path in ("/collective_rpc", "/sleep", "/reset_prefix_cache", "/pause", "/server_info"):
        assert client.post(path, json={}).status_code == 404
    answer = client.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


PATHS = [
    b"//v1/completions",
    b"/v1/completions/",
    b"/V1/completions",
    b"/health/../v1/completions",
    b"/attn_res/../v1/completions",
    b"/attn_res/..%2fv1%2fcompletions",
    b"/%76%31/completions",
    b"/v1/completions%00",
    b"/v1/completions#/health",
    b"/v1/completions;/health",
    b"/invocations",
    b"/%69nvocations",
    b"http://127.0.0.1/invocations",
    b"http://health/v1/completions",
    b"/v1/attn_res/trace",
    b"/v1/attn_res",
    b"\\v1\\completions",
    b"*",
]
HOSTS = [b"127.0.0.1", b"evil.example", b"health", b"/health", b"127.0.0.1/health#", b"[::1", b""]


def test_no_path_and_no_host_gets_around_the_key(server):
    """No answer of a model, and nothing accepted, however it is asked for."""
    body = json.dumps(COMPLETION).encode()
    for path in PATHS:
        for method in (b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT"):
            for host in HOSTS if path == PATHS[0] else HOSTS[:2]:
                status, answer = raw(server, method, path, host, body)
                # 404 and 405: the page's router has no such file, or reads it by GET alone.
                assert status in (400, 401, 404, 405), (method, path, host, status)
                assert b"choices" not in answer and b"backbone" not in answer
                if status in (404, 405):
                    assert path.startswith(b"/attn_res/")


def test_a_second_request_on_a_connection_is_asked_as_well(server):
    """Behind a public one, and behind one with the key."""
    body = json.dumps(COMPLETION).encode()
    for first in (b"", b"Authorization: Bearer %s\r\n" % KEY.encode()):
        head = b"GET /health HTTP/1.1\r\nHost: a\r\n%s\r\n" % first
        second = request(b"POST", b"/v1/completions", b"a", body)
        answers = exchange(server, head + second)
        assert [int(x) for x in re.findall(rb"HTTP/1\.1 (\d+)", answers)] == [200, 401]


def raw(server, method: bytes, path: bytes, host: bytes, body: bytes) -> tuple[int, bytes]:
    answer = exchange(server, request(method, path, host, body))
    return int(answer.split(b" ", 2)[1]), answer


def request(method: bytes, path: bytes, host: bytes, body: bytes) -> bytes:
    head = (
        b"%s %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n"
    )
    return head % (method, path, host, len(body)) + body


def exchange(server, data: bytes) -> bytes:
    """Send bytes and read until the server closes."""
    with connected(server.url) as connection:
        connection.sendall(data)
        return read(connection)


# --- bounds


@pytest.mark.parametrize(
    "headers", [b"x: " + b"a" * 2**20 + b"\r\n", b"x: a\r\n" * 2000], ids=["large", "many"]
)
def test_headers(server, headers):
    """Without a key, which would be one of them."""
    with connected(server.url) as connection:
        with suppress(ConnectionError):  # it does not read what is too much
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")
        with suppress(ConnectionError):
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
            assert connection.recv(65536) == b""
    assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("/invocations", {"prompt": "a", "n": str(SEQUENCES + 1)}, "at most 4"),
        ("/v1/completions", {"prompt": [3] * (CONTEXT + 1)}, str(CONTEXT)),
        ("/v1/attn_res/trace", {"prompt": [3] * (TRACE_TOKENS + 1)}, str(TRACE_TOKENS)),
        ("/v1/completions", {"prompt": "a", "max_tokens": CONTEXT + 1}, str(CONTEXT)),
        # Compiled, such a schema would keep the engine from every other request for a minute.
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": DEEP}}, "64 levels"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bounds_of_a_request(client, path, asked, said):
    """Ours on sequences, traces and schemas; vLLM's on the prompt and the answer."""
    assert said in error_of(client.post(path, json={"model": "demo"} | asked), 400)


def test_a_seed_with_a_prompt_in_chunks(client):
    """The second time, all but the last chunk are in the cache."""
    ask = COMPLETION | {"prompt": "def write(self, data):\n" * 30, "seed": 7, "temperature": 1}
    asked = [client.post("/v1/completions", json=ask | {"max_tokens": 8}) for _ in range(2)]
    first, second = (one.raise_for_status().json() for one in asked)
    assert first["usage"]["prompt_tokens"] > 2 * CHUNK
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


# --- text only


@contextmanager
def canary() -> Iterator[tuple[str, list]]:
    """An address on this machine, and who connected to it."""
    visits: list = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:
                    return
                visits.append(address)
                connection.close()

        thread = Thread(target=listen, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x.png", visits
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def parts(url: str) -> list[dict]:
    data = "aGVsbG8="
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"image_url": url},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_image", "image_url": url},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "image_embeds", "image_embeds": data},
        {"type": "prompt_embeds", "data": data},
        {"type": "file", "file": {"file_data": data}},
        {"type": "image_url", "image_url": {"url": url}, "uuid": "x"},
    ]


def test_media_are_refused_and_not_fetched(client):
    """In every request that takes messages, one way or another."""
    text = {"type": "text", "text": "what is this?"}
    with canary() as (url, visits):
        for part in parts(url):
            messages = [{"role": "user", "content": [text, part]}]
            for path, asked in (
                ("/v1/chat/completions", {"messages": messages}),
                ("/v1/chat/completions", {"messages": messages, "stream": True}),
                ("/v1/chat/completions/batch", {"messages": [messages]}),
                ("/invocations", {"messages": messages}),
                ("/tokenize", {"messages": messages}),
                ("/v1/attn_res/trace", {"messages": messages}),
            ):
                error_of(client.post(path, json={"model": "demo", "max_tokens": 1} | asked), 400)
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        said = [{"role": "user", "content": [image]}]
        error_of(client.post("/v1/responses", json={"model": "demo", "input": said}), 400)
        image = {"type": "image", "source": {"type": "url", "url": url}}
        said = [{"role": "user", "content": [image]}]
        asked = {"model": "demo", "messages": said, "max_tokens": 1}
        assert client.post("/v1/messages", json=asked).status_code == 400
        asked = {"model": "demo", "prompt": "a", "prompt_embeds": "aGVsbG8="}
        error_of(client.post("/v1/completions", json=asked), 400)
        time.sleep(0.5)
    assert visits == []


# --- errors


BODIES = [
    b"[" * 15_000,
    b'{"model": "demo", "prompt": {"a": 1}}',
    b'{"model": "demo", "prompt": [999999999]}',
    b'{"model": "demo", "prompt": "a", "logit_bias": {"x": 1}}',
    b'{"model": "demo", "prompt": "a", "structured_outputs": {"regex": "("}}',
    b'{"model": "demo", "prompt": "a", "structured_outputs": {"json": "{"}}',
    b'{"model": "demo", "prompt": "a", "response_format": {"type": "json_schema"}}',
    b'{"model": "demo", "prompt": "a", "truncate_prompt_tokens": 99999}',
    b'{"model": "demo", "messages": [{"role": 5, "content": null}]}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "a"}], "chat_template": "{{ x"}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "a"}], "tools": [5]}',
    b'{"model": "demo", "messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}',
]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/attn_res/trace"]
)
def test_errors_name_nothing_of_the_machine(client, path):
    for body in BODIES:
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (body[:60], answer.text)
        if answer.status_code != 200:
            error_of(answer, answer.status_code)
    answer = client.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert 400 <= answer.status_code < 500
