"""Train the demo by policy gradient, with a server's answers and the server's weights.

    python examples/rl.py

The reward of an answer is the share of its tokens that begin with a space.  Every step samples
answers over HTTP, computes their logprobs in torch, compares them with the server's, follows the
gradient of the reward, and puts the new weights in the place of the server's.  The last line is
JSON.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from attnres_serve import WeightSender, compare_logprobs
from attnres_serve.verify import oracle

DEMO = Path(__file__).resolve().parent / "demo" / "checkpoint"
FLAGS = ("--enable-weight-updates", "--dtype", "float32", "--enforce-eager")
URL = "http://127.0.0.1:8017"
PROMPT, ANSWERS, TOKENS, RATE = "def ", 8, 8, 3e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a server of the demo that runs, with the flags of FLAGS")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    with serving() if given.url is None else running(given.url) as url:
        print(json.dumps(train(url, given.steps)))


def train(url: str, steps: int) -> dict[str, Any]:
    """Mean reward and largest difference of logprobs of every step."""
    model = oracle.load(DEMO)  # float64; any forward pass in torch would do
    for tensor in model.weights.values():
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(model.weights.values(), RATE)
    sender = WeightSender(url)
    found: dict[str, Any] = {"rewards": [], "differences": []}
    for step in range(steps):
        answers = sample(url, seed=step)
        rewards = torch.tensor([reward(answer) for answer in answers], dtype=torch.float64)
        own = [logprobs(model, answer) for answer in answers]
        theirs = [value for answer in answers for value in answer["logprobs"]["token_logprobs"]]
        compared = compare_logprobs(torch.cat(own), theirs)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        loss = -sum(a * one.sum() for a, one in zip(advantages, own, strict=True)) / len(own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tensors = ((name, tensor.detach().float()) for name, tensor in model.weights.items())
        sender.send(tensors, version=f"step {step + 1}")
        found["rewards"].append(rewards.mean().item())
        found["differences"].append(compared.maximum)
        print(f"step {step + 1}: reward {rewards.mean():.3f}, {compared}", file=sys.stderr)
    return found


def sample(url: str, seed: int) -> list[dict[str, Any]]:
    """Answers of the server, with their token ids and logprobs."""
    asked = {
        "prompt": PROMPT,
        "n": ANSWERS,
        "max_tokens": TOKENS,
        "logprobs": 0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    choices: list[dict[str, Any]] = post(url, "v1/completions", asked)["choices"]
    return choices


def post(url: str, route: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    with urlopen(Request(f"{url}/{route}", json.dumps(body).encode(), headers)) as answer:
        return json.loads(answer.read())


def reward(answer: dict[str, Any]) -> float:
    return sum(token.startswith(" ") for token in answer["logprobs"]["tokens"]) / TOKENS


def logprobs(model: oracle.Model, answer: dict[str, Any]) -> Tensor:
    """Those of an answer's tokens, ``[tokens]``, by the trainer's own forward pass."""
    prompt, tokens = answer["prompt_token_ids"], answer["token_ids"]
    rows = model.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@contextmanager
def serving() -> Iterator[str]:
    """A server of the demo, for as long as it is used."""
    port = URL.rpartition(":")[2]
    words = [sys.executable, "-m", "attnres_serve", "serve", str(DEMO), "--port", port, *FLAGS]
    key = os.environ.setdefault("OPENAI_API_KEY", secrets.token_urlsafe())
    server = subprocess.Popen(words, stdout=sys.stderr, env=os.environ | {"VLLM_API_KEY": key})
    try:
        while server.poll() is None and not is_ready():
            time.sleep(1)
        if server.poll() is not None:
            sys.exit("The server has ended; it says why above.")
        yield URL
    finally:
        server.terminate()
        server.wait()


@contextmanager
def running(url: str) -> Iterator[str]:
    yield url


def is_ready() -> bool:
    try:
        with urlopen(f"{URL}/ready") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
