"""``attnres_serve.trace``: what a server and an engine are asked, and what is refused."""

import json
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cells
import httpx
import numpy as np
import pytest
from asked_server import asked_server
from serving import DEMO, environment, free_port

import attnres_serve
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.inspect import ask
from attnres_serve.inspect.edits import Edit
from attnres_serve.inspect.question import Question
from tests.inspect.test_command import made_up

URL = "http://127.0.0.1:8000/"
PROMPT = "import os"
BAN = {"sites": [9, "final"], "sources": ["block 2"], "ban": True}


@pytest.fixture
def server(monkeypatch):
    """Set what the next answer is; what was asked is kept."""
    asked = asked_server(monkeypatch)
    asked["answer"] = httpx.Response(200, content=made_up(3, 2).model_dump_json())
    return asked


@pytest.fixture
def engine(monkeypatch):
    """What an engine was asked; none is started."""
    asked = {}

    def ask_engine(prepared, words, sites, question, resolved, bar):
        asked.update(prepared=prepared, words=words, sites=sites)
        asked.update(question=question, resolved=resolved)
        return made_up(3, 2)

    monkeypatch.setattr(ask, "ask_engine", ask_engine)
    return asked


# A server is asked.


@pytest.mark.parametrize("variable", [None, "of the variable"])
@pytest.mark.parametrize("key", [None, "a key"])
def test_a_server_is_asked(key, variable, server, monkeypatch):
    """With what is given alone, and with the key that is given rather than the variable's."""
    if variable:
        monkeypatch.setenv("OPENAI_API_KEY", variable)
    found = attnres_serve.trace(URL, PROMPT, key=key)
    assert isinstance(found, attnres_serve.Trace) and found.answer == made_up(3, 2)
    assert server["url"] == "http://127.0.0.1:8000/v1/attn_res/trace"
    assert server["json"] == {"prompt": PROMPT}
    used = key or variable
    assert server["headers"] == ({"Authorization": f"Bearer {used}"} if used else {})


def test_everything_that_can_be_asked(server):
    """Numbers of NumPy's too; an edit as the command takes it and as the route does."""
    attnres_serve.trace(
        URL,
        np.arange(3),
        max_tokens=2,
        sites=np.array([9, 16]),
        tokens=range(1, 4),
        edits=['ban sites=9,final sources="block 2"', BAN | {"tokens": {"start": 2}}],
        logprobs=3,
        lens=0,
    )
    assert server["json"] == {
        "prompt": [0, 1, 2],
        "max_tokens": 2,
        "sites": [9, 16],
        "tokens": [1, 2, 3],
        "edits": [BAN, BAN | {"tokens": {"start": 2}}],
        "logprobs": 3,
        "lens": 0,
    }
    attnres_serve.trace(URL, PROMPT, tokens={"start": 1, "end": 2}, edits="scale=2")
    assert server["json"]["tokens"] == {"start": 1, "end": 2}
    assert server["json"]["edits"] == [{"scale": 2.0}]
    attnres_serve.trace(URL, PROMPT, edits=BAN)
    assert server["json"]["edits"] == [BAN]


@pytest.mark.parametrize(
    ("answer", "asked", "sentence"),
    [
        (httpx.Response(401), {}, "wants an API key; give it in the variable OPENAI_API_KEY"),
        (httpx.Response(401), {"key": "x"}, "wants an API key; `key` is another"),
        (httpx.Response(400, json={"error": {"message": "Too long."}}), {}, "400.: Too long"),
        (httpx.Response(200, text="<html>"), {}, "expected an answer of attnres-serve's route"),
    ],
)
def test_a_server_that_gives_no_trace(answer, asked, sentence, server):
    server["answer"] = answer
    with pytest.raises(SettingError, match=sentence):
        attnres_serve.trace(URL, PROMPT, **asked)


def test_an_answer_whose_numbers_do_not_fit(server):
    content = made_up(3, 2)
    content.sites[1].weights[2].pop()
    server["answer"] = httpx.Response(200, content=content.model_dump_json())
    with pytest.raises(SettingError, match="gives no trace"):
        attnres_serve.trace(URL, PROMPT)


def test_no_server():
    with pytest.raises(SettingError, match=r"cannot be asked: no server listens there .*refused"):
        attnres_serve.trace(f"http://127.0.0.1:{free_port()}", PROMPT)


class Plain(BaseHTTPRequestHandler):
    """Has no such route, and says what was asked for."""

    def do_POST(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(json.dumps({"error": {"message": f"asked {self.path}"}}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def listening(certificate: Path | None = None) -> Iterator[int]:
    """The port of a server, which speaks TLS with a certificate."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that give up
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """A key and a certificate that it signed itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("certificate") / "own.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = [*("openssl", *words.split()), *names, "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize("below", ["", "/", "/v1", "/attn_res", "/v1/attn_res/trace"])
def test_a_server_on_this_machine_is_asked_past_a_proxy(below, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with listening() as port, pytest.raises(SettingError, match=r"asked /v1/attn_res/trace$"):
        attnres_serve.trace(f"http://127.0.0.1:{port}{below}", PROMPT)


def refusal(url: str) -> str:
    with pytest.raises(SettingError) as caught:
        attnres_serve.trace(url, PROMPT)
    said = str(caught.value)
    assert said.startswith(f"the server {url} cannot be asked: ") and "\n" not in said
    return said


def test_a_server_that_is_asked_in_another_way(certificate, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with listening(certificate) as port:
        url = f"https://127.0.0.1:{port}"
        said = refusal(url)
        assert "does not trust its certificate" in said and said.endswith("SSL_CERT_FILE.")
        assert "if it has a certificate, write https://" in refusal(f"http://127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
        with pytest.raises(SettingError, match=r"asked /v1/attn_res/trace$"):
            attnres_serve.trace(url, PROMPT)
    with listening() as port:
        assert "give its address with http://." in refusal(f"https://127.0.0.1:{port}")


def test_a_proxy_that_does_not_pass_it_on(monkeypatch):
    with listening() as port:
        for proxy in (f"http://127.0.0.1:{free_port()}", "http://["):
            monkeypatch.setenv("http_proxy", proxy)
            said = refusal("http://10.0.0.1:8000")
            assert "the proxy in the variable http_proxy does not pass it on" in said
            assert "add 10.0.0.1 to the variable no_proxy" in said
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        with pytest.raises(SettingError, match=r"asked http://10.0.0.1:8000/v1/attn_res/trace$"):
            attnres_serve.trace("http://10.0.0.1:8000", PROMPT)


# An engine is started.


def test_an_engine_is_asked(engine):
    """Text as the tokenizer has it, edits by numbers, and flags as on a command line."""
    edit = 'ban sites=9,final sources="block 2"'
    attnres_serve.trace(
        DEMO,
        PROMPT,
        max_tokens=2,
        edits=edit,
        sites=[4, 2],
        lens=1,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        served_model_name=["demo", "other"],
        seed=None,
        additional_config={"attnres_backend": "torch"},
    )
    assert engine["words"] == [
        *("--dtype=float32", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--served-model-name", "demo", "other"),
        '--additional-config={"attnres_backend": "torch"}',
    ]
    prepared = engine["prepared"]
    assert "".join(prepared.texts(prepared.given)) == f"<s>{PROMPT}"
    assert f"--max-model-len={len(prepared.given) + 2}" in prepared.flags
    assert engine["question"] == Question(
        max_tokens=2, sites=[4, 2], edits=[Edit.model_validate(BAN)], lens=1
    )
    assert [site.index for site in engine["sites"]] == [2, 4]
    (resolved,) = engine["resolved"]
    assert (resolved.kind, resolved.runs) == ("ban", [(0, len(prepared.given) + 2)])
    assert [index for index, _ in resolved.sites] == [9, 16]


def test_an_engine_of_token_ids(engine):
    attnres_serve.trace(str(DEMO), np.array([5, 6]), max_model_len=64)
    assert engine["prepared"].given == [5, 6] and engine["resolved"] == []
    assert "--max-model-len=64" in engine["prepared"].flags


# What is refused.


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"prompt": []}, "the prompt has no token"),
        ({"prompt": [3, 99999]}, "token 99999 is not in the vocabulary of 2048 tokens"),
        ({"prompt": [-1]}, "token -1 is not in the vocabulary"),
        ({"prompt": [2.5]}, "prompt: 'float' object .*; expected a list of whole numbers"),
        ({"max_tokens": -1}, "max_tokens: found -1; expected greater than or equal to 0."),
        ({"max_tokens": 9999}, "expected at most 1024"),
        ({"max_model_len": 2048}, "has a context of 1024 tokens"),
        ({"sites": [99]}, "There is no site 99"),
        ({"sites": ["mlp"]}, "sites: 'str' object .*; expected a list of whole numbers"),
        ({"tokens": [3]}, "There is no token 3; the sequence has at most 3"),
        ({"tokens": {"begin": 3}}, r"tokens\.begin is no field that is read; leave it out\."),
        ({"tokens": {"start": 3}}, "The range of tokens is empty"),
        ({"edits": "ban places=3"}, r"edits\[0\]: 'places' is no field"),
        ({"edits": [BAN, "sites=3"]}, r"edits\[1\]: 'sites' stands where it cannot"),
        ({"edits": [BAN, {"mean": "no"}]}, r'edits\[1\].mean: found "no"; expected true.'),
        ({"edits": [{"sites": [3]}]}, r"edits\[0\]: give exactly one of `ban`"),
        ({"edits": {"scale": 2, "sites": [99]}}, r"edits\[0\].sites: there is no site 99"),
        ({"edits": 5}, r"edits\[0\]: found 5; expected an object"),
        ({"tokens": 5}, "tokens: 'int' object .*; expected a list of whole numbers"),
        ({"logprobs": "3"}, 'logprobs: found "3"; expected a whole number'),
        ({"lens": 21}, "lens is 21; expected at most 20"),
        ({"logprobs": 21}, "logprobs is 21; expected at most 20"),
        ({"edits": BAN, "max_tokens": 65}, "max_tokens is 65; with edits expected at most 64"),
        ({"lens": -1}, "lens: found -1; expected greater than or equal to 0"),
        ({"key": "a key"}, "key is for a server"),
        ({"max_token": 3}, "found --max-token, which is no flag; did you mean --max-tokens"),
        ({"model": "other"}, "--model does not go with inspect"),
        ({"tokenizer": "other"}, "--tokenizer does not go with inspect"),
    ],
)
def test_a_refusal_is_one_sentence(asked, sentence, engine):
    """Before an engine starts."""
    with pytest.raises(SettingError, match=sentence) as refusal:
        attnres_serve.trace(DEMO, **{"prompt": PROMPT} | asked)
    said = str(refusal.value)
    assert "\n" not in said and said.endswith((".", "?")) and not engine


@pytest.mark.parametrize("flag", [{"dtype": "float32"}, {"max_model_len": 9}, {"max_token": 3}])
def test_flags_are_of_an_engine(flag, server):
    (name,) = flag
    with pytest.raises(SettingError, match=f"{name} is for an engine; with an address none is"):
        attnres_serve.trace(URL, PROMPT, **flag)
    assert "url" not in server


def test_a_checkpoint_that_is_none():
    with pytest.raises(CheckpointError, match="no/such/folder does not exist"):
        attnres_serve.trace("no/such/folder", PROMPT)


def test_a_value_that_a_flag_does_not_have():
    """In our words where its values are listed, else as vLLM's parser says; the process goes on."""
    pytest.importorskip("vllm")
    with pytest.raises(SettingError, match=r"found --dtype half a byte; expected one of auto,"):
        attnres_serve.trace(DEMO, PROMPT, dtype="half a byte")
    with pytest.raises(SettingError, match=r"argument --max-num-seqs: invalid int value: 'a few'"):
        attnres_serve.trace(DEMO, PROMPT, max_num_seqs="a few")


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", cells.FILES, ids=lambda path: path.name)
def test_the_cells_of_python(path, tmp_path):
    """By engines of their own, where test_trace_server has a server for them."""
    cells.link_demo(tmp_path)
    done = subprocess.run(
        [sys.executable, cells.__file__, str(path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
