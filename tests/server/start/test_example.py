"""The request to paste."""

import json
import os
import subprocess

import pytest
from supervised import URL

from attnres_serve.server.start import example


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize(
    ("url", "socket_path", "model", "takes_text"),
    [
        (URL, None, "demo", True),
        ("https://[::1]:9000/a b", None, 'it\'s a "model" $HOME', True),
        ("http://localhost", "/run/a socket", "ünï/代码", False),
    ],
)
def test_the_request_can_be_pasted(url, socket_path, model, takes_text, has_key, tmp_path):
    """A shell hands curl what was meant; curl here tells its words."""
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "curl").chmod(0o755)
    said = example.request(url, socket_path, model, has_key, takes_text)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run(["sh", "-c", said], env=variables, capture_output=True, check=True)
    words = told.stdout.decode().split("\0")[:-1]
    assert f"{url}/v1/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["max_tokens"]) == (model, 40)
    assert isinstance(body["prompt"], str) == takes_text
    assert ("Authorization: Bearer YOUR_KEY" in words) == has_key
    place = ["--unix-socket", socket_path] if socket_path else []
    assert [word for word in words if word in ("--unix-socket", socket_path)] == place
