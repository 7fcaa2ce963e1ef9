"""The server on the demo checkpoint: our route, pages of others, and what the pages have."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import DEMO, run_module

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def test_info_describes_the_model(server):
    info = server.info
    assert info["format"] == "house"
    assert info["backbone"] == "llama"
    assert info["backend"] == "cpp"
    assert info["algorithm"] == "single_pass"
    layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    assert info["sites"] == 2 * layers + 1
    assert info["blocks"] == len(info["block_starts"]) > 1
    before = info["executed"]["single_pass"]
    server.complete("import os", max_tokens=5, ignore_eos=True)
    after = server.info["executed"]
    assert after["single_pass"] == before + 5  # the prompt's pass gives the first token
    assert after["two_phase"] == 0


CHAT = {"messages": [{"role": "user", "content": "def "}], "max_tokens": 1}
VALID = {
    "/v1/completions": {"prompt": "def ", "max_tokens": 1},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": "demo", **CHAT},
    "/v1/messages/count_tokens": {"model": "demo", "messages": CHAT["messages"]},
    "/v1/responses": {"input": "def ", "max_output_tokens": 1},
    "/v1/attn_res/trace": {"prompt": [5]},
    "/invocations": CHAT,
    "/tokenize": {"prompt": "def "},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", VALID)
def test_a_page_of_another_site_cannot_ask(server, path):
    """A browser sends these types without asking first, and this server has no key."""
    content = json.dumps(VALID[path]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
        headers = {"content-type": kind} if kind else {}
        answer = server.client.post(path, content=content, headers=headers)
        assert answer.is_client_error, (kind, answer.text)
    answer = server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_the_example_of_the_documentation(server):
    """Word for word but for the address."""
    page = (ROOT / "docs" / "use" / "serve.md").read_text()
    (python,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert run([sys.executable, "-c", at(server, python)]).strip()


def at(server, text: str) -> str:
    assert "http://127.0.0.1:8000" in text
    return text.replace("http://127.0.0.1:8000", server.url)


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def test_its_latency_is_measured_over_http(server):
    asked = ["--prompt-lengths", "16", "--batches", "2", "--random-output-len", "2"]
    words = ["bench", str(DEMO), "--http", server.url, *asked, "--model", "demo"]
    document = json.loads(run_module("attnres_serve", *words, timeout=300).splitlines()[-1])
    (load,) = document["loads"]
    assert load["completed"] == 40
    assert 0 < load["p50_ttft_ms"] <= load["p99_ttft_ms"] < 1e3 * load["duration"]
    assert load["output_throughput"] == pytest.approx(40 * 2 / load["duration"])


def test_loopback_only(server):
    """Nothing listens on the other addresses of this machine."""
    port = httpx.URL(server.url).port
    sockets = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = {row.split()[1] for row in sockets if row.split()[3] == "0A"}
    bound = {address for address in listening if address.endswith(f":{port:04X}")}
    assert bound == {f"0100007F:{port:04X}"}
