"""Bodies, sequences and requests at a time within their bounds."""

import asyncio
import gzip
import json
import math

import pytest
from asgi import Client, ask
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.responses import StreamingResponse

pytest.importorskip("vllm")

from bounded_app import BEARER, DATA, JSON, app_of, body_of, error_of

from attnres_serve.server.bounds import limits

LIMIT = 1000


@given(
    chunks=st.lists(st.integers(0, 700), max_size=8),
    declared=st.sampled_from([None, "true", "0", "1000", "1001", "9" * 30, "x", "-5", "1e9"]),
)
@example([1000], "true")
@example([1001], "true")
@example([500, 500, 1], None)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_size_of_a_body(chunks, declared):
    """Whatever the header says, no more than the limit is kept; all of a body arrives or none."""
    app = app_of(max_body_bytes=LIMIT)
    parts = [bytes([65 + index]) * size for index, size in enumerate(chunks)]
    total = sum(chunks)
    length = str(total) if declared == "true" else declared
    headers = [BEARER] if length is None else [BEARER, ("Content-Length", length)]
    answer = ask(app, "POST", DATA[0], headers, chunks=parts)
    is_declared = length and length.isdigit() and int(length) > LIMIT
    if total > LIMIT or is_declared:
        assert answer.status == 413 and str(LIMIT) in error_of(answer)
        assert not app.state.reached
        assert answer.taken <= (0 if is_declared else LIMIT + 700)
    else:
        assert answer.status == 200
        assert app.state.reached == [(DATA[0], b"".join(parts))]


def test_a_body_that_does_not_arrive(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
    app = app_of(max_concurrent_requests=1)
    answer = ask(app, "POST", DATA[0], [BEARER], ends=False)
    assert answer.status == 408 and "did not arrive" in error_of(answer)
    assert ask(app, "POST", DATA[0], [BEARER]).status == 200


def test_a_client_that_leaves_while_it_sends():
    app = app_of(max_concurrent_requests=1)
    answer = ask(app, "POST", DATA[0], [BEARER], chunks=[b"{"], ends=False, stays=False)
    assert answer.status is None and not app.state.reached
    assert ask(app, "POST", DATA[0], [BEARER]).status == 200


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"prompt": ["a", "b"], "n": 5}, 10),
        ({"prompt": "a", "n": 7}, 7),
        ({"prompt": "a", "n": 2, "best_of": 8}, 2),  # which vLLM does not read
        ({"prompt": "a", "n": "12"}, 12),
        ({"prompt": "a", "n": "12.0"}, 12),
        ({"prompt": "a", "n": "1_2"}, 12),
        ({"prompt": "a", "n": 12.0}, 12),
        ({"prompt": "a", "n": 10**400}, math.inf),
        ({"prompt": "a", "n": 0}, 1),
        ({"prompt": "a", "n": -3}, 1),
        ({"prompt": "a", "n": None}, 1),
        ({"token_ids": [1], "sampling_params": {"n": 7}}, 7),
        ({"prompt": "a", "n": [9]}, 1),
        ({"messages": [{"role": "user", "content": "a"}] * 3, "n": 2}, 2),
        ({"messages": [[{"role": "user"}]] * 3}, 3),
        ({"query": "a", "items": ["b"] * 4}, 4),
        ({"state": "a", "questions": {"b": {}, "c": {}}}, 2),
        ({"items": ["b"] * 4, "n": "nan"}, 4),
        ({"n": math.nan, "sampling_params": {"n": 7}}, 7),
        ([1], 1),
        ("a", 1),
    ],
)
def test_sequences_of_a_request(body, count):
    text = json.dumps(body)
    if isinstance(body, dict) and body.get("n") == 10**400:
        text = '{"prompt": "a", "n": 1' + "0" * 400 + "}"
    assert limits.sequences(json.loads(text)) == count


DEPTHS = (150, *range(900, 1000, 5), 1000, 2000, 100_000)


def nested(depth: int) -> bytes:
    """A body of this depth that no route can take for another reason too."""
    inner = depth - 1
    return b'{"prompt": {}, "metadata": %s}' % (b"[" * inner + b"]" * inner)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/tokenize", "/inference/v1/abort_requests", "/v1/attn_res/trace"),
    ],
)
def test_json_of_any_depth_is_refused_in_a_sentence(vllms_app, path):
    """How deep a route can read depends on where it is called from."""
    for depth in DEPTHS:
        answer = ask(vllms_app, "POST", path, [BEARER, JSON], chunks=[nested(depth)])
        assert answer.status == 400 and "\n" not in error_of(answer), depth
    assert "nested too deep" in error_of(answer)


@pytest.mark.parametrize("path", DATA[:2])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"a=b", b'{"n": 9,}'),  # what is no JSON is left to the route
        *(nested(500), b"[%s1]" % (b"[]," * 100_000), b'"%s"' % (b"[{" * 10_000)),
        *(b'{"prompt": "NaN Infinity 1e999"}', b'{"a": 1e300, "b": 1e-400}'),
        b'{"prompt": "\\ud83d\\ude00", "stop": ["\xf0\x9f\x98\x80"], "user": "\\\\ud83d"}',
    ],
    ids=lambda body: str(body[:20]),
)
def test_other_bodies_reach_the_route_as_they_are(path, body):
    app = app_of()
    for headers in ([BEARER, JSON], [BEARER]):
        assert ask(app, "POST", path, headers, chunks=[body]).status == 200
    assert app.state.reached == [(path, body)] * 2


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("body", "begin"),
    [
        (body_of(stop=["a", f"b{HALF}"], stream=True), "'stop' has half"),
        (body_of(vllm_xargs={"a": ["b", {"c": HALF}]}), "'vllm_xargs' has half"),
        (body_of(messages=[{"content": [{"type": "text", "text": HALF}]}]), "'messages' has half"),
        (body_of(**{HALF: 1}), "The body has half"),
        (json.dumps([HALF]).encode(), "The body has half"),
        (json.dumps(HALF).encode(), "The body has half"),
        (b'{"prompt": "\xed\xa0\xbd"}', "'prompt' has half"),  # as UTF-8 would write it
        (b'{"stop": ["a", "\\uDE00"]}', "'stop' has half"),
        (f'{{"prompt": "{HALF}"}}'.encode("utf-16", "surrogatepass"), "'prompt' has half"),
        (f'{{"prompt": "{HALF}"}}'.encode("utf-32", "surrogatepass"), "'prompt' has half"),
        (body_of(**{"x" * 5000: HALF}), "'xxx"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_its_field(body, begin):
    """No tokenizer and no engine reads it."""
    app = app_of()
    answer = ask(app, "POST", DATA[1], [BEARER, JSON], chunks=[body])
    assert answer.status == 400 and error_of(answer).startswith(begin)
    assert "half of a surrogate pair;" in error_of(answer)
    assert len(error_of(answer)) < 300 and not app.state.reached
    assert limits.cut_field(5) is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"logit_bias": {"5": NaN}}', "'logit_bias'"),
        ('{"prompt": "a", "temperature": Infinity}', "'temperature'"),
        ('{"length_penalty": -Infinity}', "'length_penalty'"),
        ('{"vllm_xargs": {"a": [1, 1e999]}}', "'vllm_xargs'"),
        ('{"min_p": -1E+0400}', "'min_p'"),
        ("[NaN]", "The body"),
        ('{"x": ' + "9" * 400 + ".0}", "'x'"),
    ],
    ids=lambda value: value[:40],
)
def test_numbers_that_are_none_are_refused_by_their_field(body, field):
    answer = ask(app_of(), "POST", "/v1/completions", [BEARER], chunks=[body.encode()])
    assert answer.status == 400
    assert error_of(answer) == (
        f"{field} has NaN or an infinite number, which JSON has not; send finite ones."
    )


def test_many_sequences_are_refused():
    app = app_of(max_sequences=4)
    for n, status in ((4, 200), (5, 400), (1e30, 400)):
        body = json.dumps({"prompt": "a", "n": n}).encode()
        answer = ask(app, "POST", "/invocations", [BEARER], chunks=[body])
        assert answer.status == status
    assert "at most 4" in error_of(answer)
    assert len(app.state.reached) == 1


class Streams:
    """An app whose one route streams until it is told to end."""

    def __init__(self, limit: int) -> None:
        self.end = asyncio.Event()
        self.app = app_of(max_concurrent_requests=limit)
        self.cancelled = 0

        async def lines():
            try:
                yield b"first\n"
                await self.end.wait()
                yield b"last\n"
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        async def stream() -> StreamingResponse:
            return StreamingResponse(lines())

        async def broken() -> None:
            raise RuntimeError("a fault")

        self.app.add_api_route("/stream", stream, methods=["POST"])
        self.app.add_api_route("/broken", broken, methods=["POST"])

    def client(self, path: str = "/stream") -> Client:
        return Client("POST", path, [BEARER])

    async def status(self) -> int | None:
        """Of one more request, a short one."""
        return (await self.client(DATA[0]).ask(self.app)).status


def run(scenario) -> None:
    async def within_time() -> None:
        await asyncio.wait_for(scenario(), 30)

    asyncio.run(within_time())


def test_streams_count_until_their_end():
    async def scenario() -> None:
        streams = Streams(2)
        clients = [streams.client() for _ in range(2)]
        running = [asyncio.create_task(client.ask(streams.app)) for client in clients]
        for client in clients:
            await client.started.wait()
        refused = await streams.client().ask(streams.app)
        assert refused.status == 429 and int(refused.headers["retry-after"]) > 0
        assert "2 requests" in error_of(refused)
        # What starts nothing in the engine is answered meanwhile, and that asks the workers is not.
        assert (await Client("GET", DATA[0], [BEARER]).ask(streams.app)).status == 200
        assert (await Client("GET", "/v1/attn_res", [BEARER]).ask(streams.app)).status == 429
        for method in ("GET", "POST"):
            assert (await Client(method, "/ping").ask(streams.app)).status == 200
        streams.end.set()
        answers = await asyncio.gather(*running)
        assert [answer.body for answer in answers] == [b"first\nlast\n"] * 2
        assert await streams.status() == 200

    run(scenario)


@given(
    st.lists(st.sampled_from(["start", "leave", "cancel", "end", "fault", "large"]), max_size=20)
)
@settings(max_examples=60, deadline=None)
def test_places_are_counted_through_any_sequence_of_events(events):
    """No event leaks a place or frees one twice."""

    async def scenario() -> None:
        streams = Streams(3)
        held: list[tuple[Client, asyncio.Task]] = []
        for event in events:
            if event == "start":
                client = streams.client()
                task = asyncio.create_task(client.ask(streams.app))
                if len(held) < 3:
                    await client.started.wait()
                    held.append((client, task))
                else:
                    assert (await task).status == 429
            elif event == "leave" and held:
                client, task = held.pop()
                client.gone.set()
                await task
            elif event == "cancel" and held:
                _, task = held.pop()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif event == "end":
                streams.end.set()
                await asyncio.gather(*(task for _, task in held))
                held.clear()
                streams.end.clear()
            elif event == "fault" and len(held) < 3:
                with pytest.raises(RuntimeError):
                    await streams.client("/broken").ask(streams.app)
            elif event == "large":
                client = Client("POST", DATA[0], [BEARER, ("Content-Length", "9" * 12)])
                assert (await client.ask(streams.app)).status == (429 if len(held) == 3 else 413)
            assert await streams.status() == (429 if len(held) == 3 else 200)
        ended = streams.cancelled
        for client, task in held:
            client.gone.set()
            await task
        assert streams.cancelled == ended + len(held)

    run(scenario)


@pytest.mark.parametrize(
    ("coding", "body", "says"),
    [
        ("gzip", gzip.compress(b"{}", mtime=0), "compressed (gzip)"),
        (None, gzip.compress(b"{}", mtime=0), "compressed (gzip)"),
        ("br", b"\x8b\x01\x80{}\xff", "compressed (br)"),
        (None, b'"\xff"', "is not in UTF-8"),
        (None, b"[" * 100_000, "is nested too deep"),
        (None, b'{"n": ' + b"9" * 5000 + b"}", "has too long a number"),
    ],
)
def test_why_a_body_cannot_be_read(coding, body, says):
    """The routes would say so in another shape."""
    headers = [BEARER, JSON, *([("Content-Encoding", coding)] if coding else [])]
    app = app_of()
    answer = ask(app, "POST", DATA[0], headers, chunks=[body])
    assert answer.status == 400 and says in error_of(answer) and error_of(answer).endswith(".")
    assert not app.state.reached
    # What is not declared as JSON is the routes' affair, unless it is too deep for any reader.
    undeclared = ask(app, "POST", DATA[0], [BEARER], chunks=[body]).status
    assert undeclared == (400 if body.startswith(b"[") else 200)
