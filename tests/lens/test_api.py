"""``attnres_serve.trace``: what a server is asked, and what is refused."""

import json
import re
import shutil
import ssl
import subprocess
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from asked_server import asked_server
from made_up import made_up
from safetensors.numpy import save
from serving import DEMO, free_port

import attnres_serve
from attnres_serve.errors import SettingError
from attnres_serve.lens import temporary_server
from attnres_serve.lens.ask import Server

URL = "http://127.0.0.1:8000/"
PROMPT = "import os"
BAN = {"sites": [9, "final"], "sources": ["block 2"], "mask": True}


@pytest.fixture
def server(monkeypatch):
    """Set what the next answer is; what was asked is kept."""
    asked = asked_server(monkeypatch)
    asked["answer"] = httpx.Response(200, content=made_up(3, 2).model_dump_json())
    return asked


@pytest.fixture
def own(monkeypatch, server):
    """What a server was started with, and asked; none is started."""

    @contextmanager
    def running(checkpoint, flags, verbose=False):
        server.update(checkpoint=checkpoint, flags=flags)
        yield Server("http://127.0.0.1:9", "its key", is_temporary=True)

    monkeypatch.setattr(temporary_server, "running", running)
    return server


# A server is asked.


@pytest.mark.parametrize("variable", [None, "of the variable"])
@pytest.mark.parametrize("key", [None, "a key"])
def test_a_request_to_a_server(key, variable, server, monkeypatch):
    """With what is given alone, and with the key that is given rather than the variable's."""
    if variable:
        monkeypatch.setenv("OPENAI_API_KEY", variable)
    found = attnres_serve.trace(URL, PROMPT, key=key)
    assert isinstance(found, attnres_serve.Trace) and found.answer == made_up(3, 2)
    assert server["url"] == "http://127.0.0.1:8000/v1/attn_res/trace"
    assert server["json"] == {"prompt": PROMPT}
    used = key or variable
    assert server["headers"] == ({"Authorization": f"Bearer {used}"} if used else {})


def test_all_options_are_sent(server):
    """Numbers of NumPy's too; an edit as the command takes it and as the route does."""
    attnres_serve.trace(
        URL,
        np.arange(3),
        max_tokens=2,
        sites=np.array([9, 16]),
        tokens=range(1, 4),
        edits=['mask sites=9,final sources="block 2"', BAN | {"tokens": {"start": 2}}],
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


def test_vectors_are_requested(server):
    """A vector of an edit as base64; what the answer has, by site and with the names of sources."""
    answer = made_up(3, 2)
    count, index = len(answer.sites[1].sources), answer.sites[1].index
    tensors = {"trace": np.frombuffer(answer.model_dump_json().encode(), np.uint8)}
    tensors[f"site.{index}.sources"] = np.ones((len(answer.tokens), count, 4), np.float32)
    server["answer"] = httpx.Response(200, content=save(tensors))
    edit = {"sites": [1], "sources": ["embedding"]}
    for vector in ([1.5, 2], np.array([1.5, 2]), torch.tensor([1.5, 2.0])):
        given = [edit | {"replace": vector}]
        found = attnres_serve.trace(URL, PROMPT, vectors=True, edits=given)
        assert server["json"]["vectors"] is True
        assert server["json"]["edits"] == [edit | {"replace": "AADAPwAAAEA="}]
    assert found.answer == answer
    sizes = {"token": len(answer.tokens), "source": count, "hidden": 4}
    assert found.vectors[index]["sources"].sizes == sizes
    assert attnres_serve.Trace(answer).vectors == {}
    for wrong in (["a"], [1j], torch.ones(2).bfloat16(), None):
        with pytest.raises(SettingError, match=r"edits\[0\].replace: found .*expected an array of"):
            attnres_serve.trace(URL, PROMPT, edits=[edit | {"replace": wrong}])
    server["answer"] = httpx.Response(200, content=b"{}")
    with pytest.raises(SettingError, match="expected an answer of attnres-serve's route"):
        attnres_serve.trace(URL, PROMPT, vectors=True)


def unfit() -> str:
    """An answer whose numbers do not fit."""
    content = made_up(3, 2)
    content.sites[1].weights[2].pop()
    return content.model_dump_json()


@pytest.mark.parametrize(
    ("answer", "asked", "sentence"),
    [
        (httpx.Response(401), {}, "wants an API key; give it in the variable OPENAI_API_KEY"),
        (httpx.Response(401), {"key": "x"}, "wants an API key; `key` is another"),
        (httpx.Response(400, json={"error": {"message": "Too long."}}), {}, "400.: Too long"),
        (httpx.Response(404, json={"detail": "Not Found"}), {}, "status 404.: expected an answer"),
        (httpx.Response(200, text="<html>"), {}, "expected an answer of attnres-serve's route"),
        (httpx.Response(200, json=[1]), {}, "expected an answer of attnres-serve's route"),
        (httpx.Response(200, content=unfit()), {}, "gives no trace"),
    ],
)
def test_a_server_that_gives_no_trace(answer, asked, sentence, server):
    server["answer"] = answer
    with pytest.raises(SettingError, match=sentence):
        attnres_serve.trace(URL, PROMPT, **asked)


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
def test_a_local_server_is_reached_past_a_proxy(below, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with listening() as port, pytest.raises(SettingError, match=r"asked /v1/attn_res/trace$"):
        attnres_serve.trace(f"http://127.0.0.1:{port}{below}", PROMPT)


def refusal(url: str) -> str:
    with pytest.raises(SettingError) as caught:
        attnres_serve.trace(url, PROMPT)
    said = str(caught.value)
    assert said.startswith(f"the server {url} cannot be asked: ") and "\n" not in said
    return said


def test_a_server_of_another_protocol(certificate, monkeypatch):
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


def test_a_proxy_that_fails(monkeypatch):
    with listening() as port:
        for proxy in (f"http://127.0.0.1:{free_port()}", "http://["):
            monkeypatch.setenv("http_proxy", proxy)
            said = refusal("http://10.0.0.1:8000")
            assert "the proxy in the variable http_proxy does not pass it on" in said
            assert "add 10.0.0.1 to the variable no_proxy" in said
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        with pytest.raises(SettingError, match=r"asked http://10.0.0.1:8000/v1/attn_res/trace$"):
            attnres_serve.trace("http://10.0.0.1:8000", PROMPT)


# A server is started.


def test_a_temporary_server_gets_the_request(own):
    """With flags as on a command line, and with its own key."""
    trace = attnres_serve.trace(
        DEMO,
        PROMPT,
        max_tokens=2,
        edits='mask sites=9,final sources="block 2"',
        sites=[4, 2],
        lens=1,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        served_model_name=["demo", "other"],
        seed=None,
        additional_config={"attnres_backend": "torch"},
    )
    assert trace.answer == made_up(3, 2)
    assert own["checkpoint"] == str(DEMO)
    assert own["flags"] == [
        *("--dtype=float32", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--served-model-name", "demo", "other"),
        '--additional-config={"attnres_backend": "torch"}',
    ]
    sent = {"prompt": PROMPT, "max_tokens": 2, "sites": [4, 2], "edits": [BAN], "lens": 1}
    assert own["json"] == sent
    assert own["headers"] == {"Authorization": "Bearer its key"}


def test_token_ids_and_the_longest_sequence(own):
    attnres_serve.trace(str(DEMO), np.array([5, 6]), max_model_len=64)
    assert own["json"] == {"prompt": [5, 6]} and own["flags"] == ["--max-model-len=64"]


def test_a_refusal_is_the_servers_sentence(own):
    """Without an address that nobody gave."""
    own["answer"] = httpx.Response(400, json={"error": {"message": "There is no site 99."}})
    with pytest.raises(SettingError, match=r"^There is no site 99\.$"):
        attnres_serve.trace(DEMO, PROMPT, sites=[99])


# What is refused.


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"prompt": [2.5]}, "prompt: found 2.5; expected text or a list of whole numbers"),
        ({"max_tokens": -1}, "max_tokens: found -1; expected at least 0."),
        ({"sites": ["mlp"]}, "sites: found 'mlp'; expected a list of whole numbers"),
        ({"tokens": {"begin": 3}}, r"tokens\.begin is no field that is read; leave it out\."),
        ({"edits": "mask places=3"}, r"edits\[0\]: 'places' is no field"),
        ({"edits": [BAN, "sites=3"]}, r"edits\[1\]: 'sites' stands where it cannot"),
        ({"edits": [BAN, {"mean": "no"}]}, r'edits\[1\].mean: found "no"; expected true.'),
        ({"edits": [{"sites": [3]}]}, r"edits\[0\]: give exactly one of `mask`"),
        ({"edits": 5}, r"edits\[0\]: found 5; expected an object\."),
        ({"edits": [BAN, {"scale": 5000}]}, r"edits\[1\].scale: found 5000; expected at most 1000"),
        (
            {"edits": {"mask": True, "tokens": 1}},
            r"tokens: found 1; expected a list or an object\.",
        ),
        ({"tokens": 5}, "tokens: found 5; expected a list of whole numbers"),
        ({"logprobs": "3"}, 'logprobs: found "3"; expected a whole number'),
        ({"edits": BAN, "max_tokens": 65}, "max_tokens is 65; with edits expected at most 64"),
        ({"lens": -1}, "lens: found -1; expected at least 0"),
        ({"key": "a key"}, "key is for a server that runs"),
    ],
)
def test_a_refusal_is_one_sentence(asked, sentence, own):
    """Before a server starts."""
    with pytest.raises(SettingError, match=sentence) as refusal:
        attnres_serve.trace(DEMO, **{"prompt": PROMPT} | asked)
    said = str(refusal.value)
    assert "\n" not in said and said.endswith((".", "?")) and "flags" not in own


def named(value: object) -> str:
    """The value, without an address, which differs in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


NO_PROMPTS = (
    *(b"import os", bytearray(b"import os"), memoryview(b"import os"), np.bytes_(b"import os")),
    *(Path("import os"), ["import os"], ["import", "os"], [b"import"], np.array("import os")),
    *(5, None, [True, False], np.array([True]), np.array([5.0]), np.array([[5], [6]]), [[5, 6]]),
    *({"input_ids": [5]}, {5: 6}, {5, 6}, frozenset([5]), torch.tensor([[5], [6]])),
    *(torch.tensor([True]), torch.tensor([0.5])),
)


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=named)
def test_prompts_of_other_types(prompt, server):
    """Though Python counts through most of it."""
    with pytest.raises(SettingError, match=r"^prompt: found .*; expected text or a list of whole"):
        attnres_serve.trace(URL, prompt)
    assert "url" not in server


@pytest.mark.parametrize("prompt", ["\ud83d", "a\udce9"], ids=ascii)
def test_half_of_a_character_is_no_text(prompt, server):
    with pytest.raises(SettingError, match=r"^prompt: found half of a surrogate pair; expected"):
        attnres_serve.trace(URL, prompt)
    assert "url" not in server


class Text(str):
    """Text of another class."""


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        *((Text("a\r\n"), "a\r\n"), (np.str_("é"), "é"), ("\ufeffa", "\ufeffa")),
        *((kind((5, 6)), [5, 6]) for kind in (list, tuple, iter, np.array, torch.tensor)),
        *((np.array([5, 6], kind), [5, 6]) for kind in ("uint8", "int32", "uint64")),
        *((range(5, 7), [5, 6]), ([np.int64(5), 6], [5, 6]), (array("i", [5, 6]), [5, 6])),
    ],
    ids=named,
)
def test_forms_of_text_and_token_ids(prompt, wanted, server):
    attnres_serve.trace(URL, prompt)
    assert server["json"] == {"prompt": wanted}


@pytest.mark.parametrize("model", [DEMO, URL])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("edit", "edits"), ("site", "sites"), ("token", "tokens"), ("logprob", "logprobs")),
        *(("len", "lens"), ("max_token", "max_tokens"), ("max_new_tokens", "max_tokens")),
        *(("keys", "key"), ("verbos", "verbose"), ("max_model_length", "max_model_len")),
    ],
)
def test_a_name_that_is_nearly_an_argument(model, name, meant, own):
    """Whether a server runs or is to be started, which has flags of its own."""
    said = f"^{name} is no argument of trace; did you mean {meant}[?]$"
    with pytest.raises(SettingError, match=said):
        attnres_serve.trace(model, PROMPT, **{name: "mask sites=3"})
    assert "flags" not in own and "url" not in own


@pytest.mark.parametrize("flag", [{"dtype": "float32"}, {"max_model_len": 9}, {"max_logprobs": 3}])
def test_flags_are_of_a_server_that_is_started(flag, server):
    (name,) = flag
    with pytest.raises(SettingError, match=f"{name} is for a server that is started"):
        attnres_serve.trace(URL, PROMPT, **flag)
    assert "url" not in server
