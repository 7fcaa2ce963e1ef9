"""Start servers for tests, ask them, stop them; compare answers with what a golden expects."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"
DEMO = TESTS.parent / "examples" / "demo" / "checkpoint"
START_TIMEOUT = 420  # seconds; a compiled start takes 40 to 100 on two cores
SMALL_GAP = 2e-3  # a greedy choice closer than this may fall either way
VOCABULARY = 320  # of the checkpoints that tests write


def bound(logprob: float) -> float:
    """How far a served logprob may be from the expected one.

    Two float32 evaluations in different order: 1e-4 for the hidden state, 2e-5 relative for the
    log-softmax of a large logit.  Measured differences are about a twentieth of it.
    """
    return 1e-4 + 2e-5 * abs(logprob)


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen
    log: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=300)

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """Greedy completion; ``prompt`` is text, token ids or a list of those."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, **options}
        return self.client.post("/v1/completions", json=body).raise_for_status().json()

    @property
    def info(self) -> dict[str, Any]:
        return self.get("/v1/attn_res")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# One cache for all servers of a test run: it spares each of them the inspection of model classes.
CACHE = tempfile.TemporaryDirectory(prefix="attnres-serve-tests-")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a server: small KV cache, nothing fetched, no interpreter for Triton."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "VLLM_PLUGINS")}
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": CACHE.name}
    return kept | own | extra


OURS = (sys.executable, "-m", "attnres_serve", "serve")
VLLMS = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")


@contextmanager
def running(
    command: tuple[str, ...],
    checkpoint: Path,
    log: Path,
    *flags: str,
    port: int | None = None,
    **env: str,
) -> Iterator[Server]:
    """A server of ``checkpoint``, started and stopped.

    Args:
        command: ``OURS`` or ``VLLMS``.
        checkpoint: folder.
        log: where its output goes.
        port: default: one that is free.
        flags, env: further flags and environment variables.
    """
    port = port or free_port()
    arguments = [*command, str(checkpoint), "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, env=environment(**env)
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        server.client.close()
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_demo(log: Path, *flags: str, **env: str) -> Iterator[Server]:
    """``attnres-serve serve`` with the demo checkpoint, eager, as ``demo``."""
    names = ("--enforce-eager", "--served-model-name", "demo")
    with running(OURS, DEMO, log, *names, *flags, **env) as server:
        yield server


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended while starting:\n{tail(server.log)}")
        try:
            if server.client.get("/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise TimeoutError(f"no answer after {START_TIMEOUT} s:\n{tail(server.log)}")


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def expected(golden: Path) -> list[dict[str, Any]]:
    return json.loads((golden / "expected.json").read_text())


def differences(
    case: dict[str, Any],
    prompt_logprobs: list[float] | None,
    output: list[int],
    logprobs: list[float],
) -> Iterator[str]:
    """Every way in which an answer departs from a case of ``expected.json``.

    Args:
        case: the case.
        prompt_logprobs: logprob of each prompt token from the second on, None if not asked for.
        output, logprobs: generated tokens and their logprobs.
    """
    if prompt_logprobs is not None:
        wanted = case["prompt_logprobs"][1:]
        assert len(prompt_logprobs) == len(wanted)
        for position, (found, want) in enumerate(zip(prompt_logprobs, wanted, strict=True), 1):
            if not abs(found - want) <= bound(want):
                yield f"prompt token {position}: {found} instead of {want}"
    assert len(output) == len(logprobs) == len(case["output"])
    rows = zip(
        output, logprobs, case["output"], case["output_logprobs"], case["output_gap"], strict=True
    )
    for position, (token, found, wanted_token, want, gap) in enumerate(rows):
        if gap < SMALL_GAP:
            return
        if token != wanted_token:
            yield f"output token {position}: {token} instead of {wanted_token}"
            return
        if not abs(found - want) <= bound(want):
            yield f"output token {position}: {found} instead of {want}"


def http_answer(choice: dict[str, Any], prompt: list[int]) -> tuple:
    """Prompt logprobs, tokens and logprobs of a choice of ``/v1/completions``.

    The request asks for ``logprobs=0``, ``return_tokens_as_token_ids`` and, perhaps,
    ``prompt_logprobs=0``.
    """
    given = choice.get("prompt_logprobs")
    prompt_logprobs = None
    if given is not None:
        pairs = zip(given[1:], prompt[1:], strict=True)
        prompt_logprobs = [entry[str(token)]["logprob"] for entry, token in pairs]
    tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    return prompt_logprobs, tokens, choice["logprobs"]["token_logprobs"]


ASK = {
    "logprobs": 0,
    "return_tokens_as_token_ids": True,
    "ignore_eos": True,
}


def check_golden_over_http(server: Server, golden: Path) -> None:
    """Alone, in a batch, and from the prefix cache: every answer within the bound."""
    cases = expected(golden)
    found: list[str] = []
    for case in cases:
        answer = server.complete(case["prompt"], prompt_logprobs=0, **ASK)["choices"][0]
        found += differences(case, *http_answer(answer, case["prompt"]))
    batch = server.complete([case["prompt"] for case in cases], prompt_logprobs=0, **ASK)
    choices = sorted(batch["choices"], key=lambda choice: choice["index"])
    for case, choice in zip(cases, choices, strict=True):
        found += differences(case, *http_answer(choice, case["prompt"]))
    longest = max(cases, key=lambda case: len(case["prompt"]))
    cached = server.complete(longest["prompt"], **ASK)
    if cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 0:
        cached = server.complete(longest["prompt"], **ASK)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    found += differences(longest, *http_answer(cached["choices"][0], longest["prompt"]))
    assert not found, "\n".join(found)


def check_executed(info: dict[str, Any], algorithm: str, compiled: bool) -> None:
    """The counters say that this algorithm ran, no other did, and whether it was compiled."""
    assert info["algorithm"] == algorithm
    assert {name for name, passes in info["executed"].items() if passes} == {algorithm}
    in_graph = info["executed_compiled"][algorithm]
    assert in_graph == (info["executed"][algorithm] if compiled else 0)


def engine_job(
    checkpoint: Path,
    prompts: list[list[int]],
    algorithm: str | None,
    mode: str = "eager",
    backend: str = "cpp",
    lora: Path | None = None,
    reload: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A job for ``run_engine``; no algorithm for a model without AttnRes, options of vllm.LLM's."""
    return {
        "checkpoint": str(checkpoint),
        "prompts": prompts,
        "algorithm": algorithm,
        "backend": backend,
        "mode": mode,
        "chunk": 0,
        "options": options,
        "lora": lora and str(lora),
        "reload": reload and str(reload),
        "env": {},
    }


def check_job(result: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """Every answer of a job on a golden within the bound: alone, in a batch and cached."""
    longest = max(cases, key=lambda case: len(case["prompt"]))
    assert result["cached"]["cached"] > 0
    found: list[str] = []
    for case, answer in [
        *zip(cases, result["alone"], strict=True),
        *zip(cases, result["batch"], strict=True),
        (longest, result["cached"]),
    ]:
        found += differences(case, answer["prompt_logprobs"], answer["tokens"], answer["logprobs"])
    assert not found, "\n".join(found)


def fresh_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def check_against(model, prompt: list[int], answer: dict, where: str) -> list[str]:
    """Compare an answer with a float64 model: prompt, and the served tokens given themselves."""
    tokens = answer["tokens"]
    ids = [*prompt, *tokens]
    logprobs = model.logprobs(ids)
    reach = rounding(model, ids, logprobs)
    found = []
    given = answer["prompt_logprobs"]
    for position, token in enumerate(prompt[1:] if given else ()):
        want = float(logprobs[position, token])
        if not abs(given[position] - want) <= bound(want) + reach[position]:
            found.append(f"{where}: prompt token {position + 1}: {given[position]}, not {want}")
    for step, (token, value) in enumerate(zip(tokens, answer["logprobs"], strict=True)):
        position = len(prompt) - 1 + step
        row = logprobs[position]
        best, want = float(row.max()), float(row[token])
        if not abs(value - want) <= bound(want) + reach[position]:
            found.append(f"{where}: output token {step}: {value}, not {want}")
        if best - want > SMALL_GAP:
            found.append(f"{where}: output token {step} is not the greedy choice")
    return found


def rounding(model, ids: Sequence[int], logprobs: torch.Tensor) -> list[float]:
    """How far float32 may lie off at each position for how its sources cancel there.

    In random models of small weights a few positions lose all but some digits: rounding the weights
    to float32 alone moves them by 1e-5 to 8e-5, others by 2e-7.  An evaluation in float32, which
    rounds everywhere, was found up to 16 times as far off (250 models of 195 positions).
    """
    draw = torch.Generator().manual_seed(0)
    moved = {
        name: weight * (1 + 2**-24 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
        for name, weight in model.weights.items()
    }
    off = replace(model, weights=moved).logprobs(ids) - logprobs
    return (32 * off.abs().amax(-1)).tolist()


def run_engine(jobs: list[dict[str, Any]], folder: Path, **env: str) -> dict[str, Any]:
    """Run jobs one after the other in one process of ``engine.py``."""
    return _run("engine.py", jobs, folder, env)


def run_verify(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run jobs one after the other in one process of ``verify_jobs.py``."""
    return _run("verify_jobs.py", jobs, folder, {})


def run_trace_jobs(jobs: list[dict[str, Any]], folder: Path, **env: str) -> list[Any]:
    """Run jobs one after the other in one process of ``trace_jobs.py``."""
    return _run("trace_jobs.py", jobs, folder, env)


def run_module(*words: str, timeout: float) -> str:
    """What ``python -m`` says on stdout; it must end well within ``timeout`` seconds."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=TESTS.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def run_benchmark(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """The document of a benchmark, run by its command line; it is the same in the file ``out``."""
    said = run_module(f"benchmarks.{name}", *arguments, "--out", str(out), timeout=1700)
    document = json.loads(said.splitlines()[-1])
    assert document == json.loads(out.read_text())
    return document


def _run(script: str, jobs: list[dict[str, Any]], folder: Path, env: dict[str, str]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    log, asked, result = folder / "log", folder / "jobs.json", folder / "results.json"
    asked.write_text(json.dumps(jobs))
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, str(TESTS / script), str(asked), str(result)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(**env),
            timeout=2400,  # a fraction of it on an idle machine
            check=False,
        )
    assert result.exists(), f"exit {done.returncode}:\n{tail(log)}"
    return json.loads(result.read_text())
