"""Importance and ablations by a server: the float64 model's losses, and docs/use/ablations.md."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cells
import numpy as np
import pytest
import torch
from edited_oracle import evaluate
from serving import DEMO, ROOT, Server, running_demo
from trace_cases import LOGPROBS

from attnres_serve.checkpoints import tokenizer
from attnres_serve.lens import ask
from attnres_serve.lens.losses import Losses
from attnres_serve.verify.oracle import load

pytestmark = pytest.mark.engine

KEY = "a-key-of-the-test"
PAGE = ROOT / "docs" / "use" / "ablations.md"
TEXTS = [
    "import os\n",
    "class Stack:\n    def __init__(self, items):\n        self.items = items\n",
    "def add(a, b):\n    return a + b\n",
    "for name in names:\n    print(name)\n",
    "# Größe in Bytes\nGRÖSSE = 1024\n",
    "try:\n    value = int(text)\nexcept ValueError:\n    value = None\n",
]
MASKS = [
    [(1, "embedding")],
    [(8, "block 2")],
    [(16, "partial")],
    [(8, "block 2"), (9, "block 2"), (5, "partial"), (16, "block 1")],
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("edits") / "log"
    flags = ("--dtype", "float32", "--max-model-len", "512", "--enable-attnres-edits")
    with running_demo(log, *flags, VLLM_API_KEY=KEY) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running


def test_losses_are_those_of_a_float64_model(server, tmp_path):
    model, encode = load(DEMO), tokenizer.load(DEMO)
    asked = ask.Server(server.url, KEY)
    measured = Losses(asked, server.client, "demo", TEXTS, tmp_path / "losses.jsonl")
    every = [encode(text).input_ids for text in TEXTS]
    assert measured.tokens.tolist() == [len(ids) - 1 for ids in every]

    def nats(ids: list[int], masks: list[tuple[int, str]]) -> float:
        edits = [
            {"sites": [site], "sources": [name], "tokens": [*range(len(ids))], "mask": True}
            for site, name in masks
        ]
        table = evaluate(model, ids, edits)[2][:-1]
        return -float(table.gather(1, torch.tensor(ids[1:])[:, None]).sum())

    far = LOGPROBS * measured.tokens  # each token is off by so much at most
    for masks in [[], *MASKS]:
        wanted = np.array([nats(ids, masks) for ids in every])
        assert (abs(measured.under(masks) - wanted) < far).all()
    measured.serve([])
    assert server.get("/v1/attn_res/edits")["edits"] == []


@pytest.mark.soak
def test_the_page_of_ablations(server, monkeypatch, tmp_path):
    """Its commands show what is written; lm-eval is that of `make soak`."""
    start, *commands = [
        cells.Cell(*both) for both in re.findall(cells.COMMANDS, PAGE.read_text(), re.S)
    ]
    assert "--enable-attnres-edits" in start.code and "--dtype float32" in start.code
    cells.link_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    paths = (Path(sys.executable).parent, Path(f"{sys.prefix}-soak", "bin"))
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, paths)), prepend=os.pathsep)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    shown = []
    for command in commands:
        if "attnres-serve serve" in command.code:  # the same edit by a flag
            assert shlex.split(command.code)[-2:] == ["--attnres-edit", 'mask sources="block 2"']
            continue
        code = command.code.replace("http://127.0.0.1:8000", server.url)
        words = ["bash", "-ec", code]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        shown.append((command, done.stdout))
    for command, found in shown:
        if command.shown:
            cells.compare(command, found)
