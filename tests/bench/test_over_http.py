"""``attnres-serve bench --http``: what its client is told, and servers that cannot be asked."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from typing import Any

import pytest
from serving import DEMO

from attnres_serve.bench import over_http
from attnres_serve.bench.document import HttpDocument, Load
from attnres_serve.cli import main
from attnres_serve.compat import bench_client
from attnres_serve.errors import SettingError


def measured(
    monkeypatch: pytest.MonkeyPatch, capsys, *words: str, longest: float = inf
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The document of a run against a server that answers at once, and what its client was told."""
    asked: list[dict[str, str]] = []

    def answer(flags: list[str]) -> dict[str, Any]:
        asked.append(dict(word.removeprefix("--").partition("=")[::2] for word in flags))
        number = int(asked[-1]["num-prompts"])
        found = {"completed": number, "max_concurrency": int(asked[-1]["max-concurrency"])}
        for which in ("input", "output"):
            found[f"total_{which}_tokens"] = number * int(asked[-1][f"random-{which}-len"])
        return dict.fromkeys(Load.model_fields, 5) | found | {"itls": []}

    monkeypatch.setattr(bench_client, "ask_over_http", answer)
    served = over_http.Served("demo", longest)
    monkeypatch.setattr(over_http, "check_there", lambda url, model, flags: served)
    assert main(["bench", str(DEMO), "--http", "http://x", *words, "--header", "A=b"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1]), asked


def test_the_client_runs_the_command_of_the_document(monkeypatch, capsys):
    """The model's name, too: vLLM's client asks for the first one without the key."""
    shape = ("--prompt-lengths", "32", "16", "--batches", "2", "1")
    document, asked = measured(monkeypatch, capsys, *shape)
    HttpDocument.model_validate(document)
    assert all(flags["model"] == "demo" for flags in asked)
    loads = document["loads"]
    assert [(load["total_input_tokens"], load["max_concurrency"]) for load in loads] == [
        *((32 * 40, 2), (32 * 20, 1), (16 * 40, 2), (16 * 20, 1)),
    ]
    assert document["command"].endswith("--header '***'")
    lines = over_http.render(loads).splitlines()
    assert lines[1].split() == ["2", "32", "49", "5.0", "TTFT", "5.00", "5.00", "5.00"]
    assert len(lines) == 2 + 3 * len(loads) and max(map(len, lines)) <= 80


def test_no_prompt_reaches_a_server_twice(monkeypatch, capsys):
    """In no two runs, and the client's warm-up, which is its first prompt, is not used."""
    (document, first), (_, second) = (measured(monkeypatch, capsys) for _ in range(2))
    assert len({flags["seed"] for flags in first + second}) == len(first + second) == 16
    for flags in first:  # two lengths and two batches, each with a warm-up
        assert flags["num-warmups"] == flags["ready-check-timeout-sec"] == "0"
    assert [load["seed"] for load in document["loads"]] == [
        int(flags["seed"]) for flags in first[1::2]
    ]


def test_a_request_is_as_long_as_the_server_allows(monkeypatch, capsys):
    """The client's texts had up to 130 tokens where 128 were asked for, so some room is left."""
    for longest, most in ((90, 85), (100, 94), (128, 120)):
        _, asked = measured(monkeypatch, capsys, longest=longest)
        lengths = {int(one["random-input-len"]) + int(one["random-output-len"]) for one in asked}
        assert max(lengths) <= most


def test_requests_that_fail_are_no_figure(monkeypatch, capsys):
    failed = {"completed": 3, "failed": 5}
    monkeypatch.setattr(bench_client, "ask_over_http", lambda flags: failed)
    monkeypatch.setattr(over_http, "check_there", lambda *_: over_http.Served("demo", inf))
    assert main(["bench", str(DEMO), "--http", "http://x", "--batches", "8"]) == 2
    assert "3 of 8 requests succeeded, 8 at a time" in capsys.readouterr().err


def test_a_flag_that_the_client_does_not_know_is_one_sentence(capsys):
    with pytest.raises(SettingError, match=r"^unrecognized arguments: --foo; with --http, flags"):
        bench_client.ask_over_http(["--foo"])
    assert "usage" not in capsys.readouterr().err


@contextmanager
def answering(status: int, content: bytes, key: str | None = None):
    """The address of a server that gives one answer, to those who have a key if it asks for one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            knows = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(status if knows and self.path == "/v1/models" else 401)
            self.end_headers()
            self.wfile.write(content if knows else b"")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()


@pytest.mark.parametrize(
    ("status", "content", "sentence"),
    [
        (200, b"<html>", r"\(/v1/models gives no list of models\); expected the address"),
        (200, b"[]", r"\(/v1/models gives no list of models\)"),
        (200, b'{"data": []}', r"\(/v1/models gives no list of models\)"),
        (200, b'{"data": [{"id": "a"}]}', r"has no model demo; it has a\. Correct --model"),
        (404, b"", r"\(/v1/models has status 404\); expected the address"),
        (503, b"", r"\(/v1/models has status 503\)"),
    ],
)
def test_an_unreachable_server_is_one_sentence(status, content, sentence):
    model = None if content == b'{"data": []}' else "demo"
    with answering(status, content) as url, pytest.raises(SettingError, match=sentence):
        over_http.check_there(url, model)


@pytest.mark.parametrize("below", ["", "/v1/", "/v1/attn_res/trace"])
def test_a_key_is_required_and_accepted(below, monkeypatch):
    """A server on this machine is asked past a proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    content = b'{"data": [{"id": "demo", "max_model_len": 99}, {"id": "a"}]}'
    with answering(200, content, key="right") as url:
        with pytest.raises(
            SettingError, match=r"asks for a key \(status 401\); set OPENAI_API_KEY"
        ):
            over_http.check_there(url + below, None)
        for flags in (["--header", "x=y", "Authorization=Bearer right"], []):
            if not flags:
                monkeypatch.setenv("OPENAI_API_KEY", "right")
            for model, found in ((None, ("demo", 99)), ("a", ("a", inf))):
                named = [] if model is None else [f"--model={model}"]
                assert (
                    over_http.check_there(url + below, *over_http.model_and_headers(named + flags))
                    == found
                )
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        with pytest.raises(SettingError, match=r"refuses the key \(status 401\); correct OPENAI"):
            over_http.check_there(url + below, None)
