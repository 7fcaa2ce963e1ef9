"""benchmarks/peers: the models of the others, what is asked of all, and what is refused."""

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import ROOT, run_benchmark
from torch import Tensor
from tqdm import tqdm

from attnres_serve.bench.process import Engine
from attnres_serve.errors import SettingError
from attnres_serve.verify.oracle import load
from benchmarks.peers import __main__ as peers
from benchmarks.peers import models as peer_models
from benchmarks.peers import process as peer_process
from benchmarks.peers.__main__ import Peer
from benchmarks.published import tables


@pytest.fixture(scope="module", params=peers.TINY)
def models(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    peer_models.write_checkpoints(folder, peers.TINY[request.param])
    return folder


def greedy(models: Path, style: str) -> peer_process.Generate:
    return peer_process.hugging_face(str(models / "attnres"), "float32", style)[0]


@pytest.mark.parametrize("style", peer_models.STYLES)
def test_the_cached_answers_are_the_greedy_ones_of_a_float64_model(models, style):
    """In padded batches and alone; and no choice is so close that rounding could turn the gate."""
    oracle, generate = load(models / "attnres"), greedy(models, style)
    for work in peers.TINY_WORKLOADS:
        requests = work.requests(512, 0)
        answers = generate(requests)
        assert [len(answer) for answer in answers] == [wanted for _, wanted in requests]
        assert answers[:9] == generate(requests[:9])  # eight together and one alone
        for (prompt, _), answer in zip(requests, answers, strict=True):
            logprobs = oracle.logprobs(prompt + answer)[len(prompt) - 1 : -1]
            best, second = logprobs.topk(2).values.T
            assert logprobs.argmax(-1).tolist() == answer
            assert (best - second).min() > 1e-4


def test_the_gate_sees_queries_and_key_norms(models, monkeypatch):
    requests = peers.TINY_WORKLOADS[0].requests(512, 0)
    right = greedy(models, "fla")(requests)

    def plain_mean(values: Tensor, query: Tensor, key_norm: Any, norm: Any) -> Tensor:
        return norm(values.mean(0))

    def without_key_norm(values: Tensor, query: Tensor, key_norm: Any, norm: Any) -> Tensor:
        key_norm.weight.data.fill_(1)
        return peer_models.fla(values, query, key_norm, norm)

    for site in (plain_mean, without_key_norm):
        monkeypatch.setitem(peer_models.STYLES, "fla", site)
        found = greedy(models, "fla")(requests)
        with pytest.raises(RuntimeError, match=r"other tokens than hf_open_attnres .*: hf_fla$"):
            peers.agree({peers.HF: right, "hf_fla": found, peers.VLLM: []})


def test_both_checkpoints_share_their_weights(models):
    ours, plain = (
        peer_models.LlamaForCausalLM.from_pretrained(models / name).state_dict()
        if name == "standard"
        else peer_models.AttnResLlamaForCausalLM.from_pretrained(models / name).state_dict()
        for name in ("attnres", "standard")
    )
    assert all(torch.equal(ours[name], weight) for name, weight in plain.items())
    own = ours.keys() - plain.keys()
    assert own and all("_res_" in name for name in own)
    for weight in ours.values():
        assert weight.dtype == torch.bfloat16 and weight.abs().max() > 1e-2


@pytest.mark.parametrize("works", [peers.WORKLOADS, peers.TINY_WORKLOADS], ids=["real", "tiny"])
def test_prompts_are_new_in_every_round_and_lengths_are_not(works):
    stream, batch, single = works
    rounds = [[work.requests(512, number) for work in works] for number in range(3)]
    assert rounds[1] == [work.requests(512, 1) for work in works]
    prompts = [tuple(prompt) for drawn in rounds for work in drawn for prompt, _ in work]
    long = [prompt for prompt in prompts if len(prompt) > 4]
    assert len(set(long)) == len(long) > 3 * 9
    for work, requests in zip(works, rounds[0], strict=True):
        assert tuple((len(prompt), wanted) for prompt, wanted in requests) == work.lengths
        longest = max(map(sum, work.lengths))
        assert longest <= min(peers.LENGTH, max(map(sum, stream.lengths)))
    assert batch.lengths == 8 * single.lengths
    assert len(set(stream.lengths)) > len(stream.lengths) / 2


def test_a_peer_imports_nothing_of_ours():
    """Else the baseline would not be stock, and its state could not tell."""
    code = "import sys, benchmarks.peers.process as _; sys.exit('attnres_serve' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def facts(peer: Peer, passes: int = 0, **changes: Any) -> dict[str, Any]:
    """What a sound process says of itself after ``passes``."""
    executed = {name: {"eager": 1, "compiled": 4} for name in ("single_pass", "two_phase")}
    if peer.algorithm:
        executed[peer.algorithm]["compiled" if peer.compiled else "eager"] += passes
    ours = peer.algorithm is not None
    found = {"plugin_loaded": ours, "executed": executed if ours else {}, "start_s": 1.0}
    found |= {"compiled": peer.compiled, "backend": peer.backend, "graphs": 2 * peer.compiled}
    return found | changes


@pytest.mark.parametrize("peer", [*peers.PEERS, *peers.EAGER], ids=str)
def test_what_ran_must_be_what_the_name_says(peer, tmp_path):
    engine = Engine(peer.contender(tmp_path, "bfloat16"), None, tmp_path, facts(peer))
    peers.check(peer, engine, facts(peer), facts(peer, 3))
    ran = {"plugin_loaded": True}  # the plugin in a baseline, or another algorithm
    if peer.algorithm:
        other = {"single_pass": "two_phase", "two_phase": "single_pass"}[peer.algorithm]
        ran["executed"] = facts(replace(peer, algorithm=other), 3)["executed"]
    changes = {"compiled": not peer.compiled}, {"graphs": 9}, {"backend": "triton"}, ran
    for wrong in changes:
        with pytest.raises((RuntimeError, SettingError), match=r"is not what|the plugin; expected"):
            peers.check(peer, engine, facts(peer), facts(peer, 3) | wrong)


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """Who was asked, in order; processes are pretended."""
    asked: list[str] = []
    by_name = {peer.name: peer for peer in peers.EAGER}

    @contextmanager
    def running(contender, folder):
        assert (folder / "attnres" / "config.json").is_file()
        peer, count = by_name[contender.name], 0

        def ask(what, requests=()):
            nonlocal count
            if what == "facts":
                return facts(peer, count)
            count += 1
            asked.append(peer.name)
            tokens = [[7] * wanted for _, wanted in requests]
            return {"seconds": 2.0 + len(peer.name), "tokens": tokens}

        engine = {"name": peer.name, "contender": contender, "at_start": facts(peer), "ask": ask}
        yield SimpleNamespace(**engine, wait=lambda: None)
        asked.append("ended")

    monkeypatch.setattr(peers, "running", running)
    monkeypatch.setattr(peers, "DISCARDED", 0)
    return asked


def test_rounds_are_in_turn_and_every_one_in_another_order(order):
    with tqdm(disable=True) as progress:
        found, samples = peers.measure(
            peers.TINY["128x4"], "float32", peers.EAGER, peers.TINY_WORKLOADS, 3, progress
        )
    names = [one.name for one in peers.EAGER]
    each = len(peers.TINY_WORKLOADS)
    turns = order[: -len(names) : each]
    assert order[-len(names) :] == ["ended"] * len(names)
    assert turns == names + names[::-1] + names[1:] + names[:1]
    assert found == {peer.name: facts(peer, 3 * each) for peer in peers.EAGER}
    assert samples == {
        (work, name): [2.0 + len(name)] * 3 for work in peers.TINY_WORKLOADS for name in names
    }


def test_rows_and_table():
    scale = {peers.HF: 4.0, peers.VLLM: 1.0, "single_pass_cpp": 1.25}
    work = peers.WORKLOADS[1]
    samples = {(work, name): [factor, 3 * factor, factor] for name, factor in scale.items()}
    rows = peers.summarise("768x12", samples)
    hf, plain, ours = rows
    assert hf["over_vllm"] == {"ratio": 4, "ci95": [4, 4]}
    assert plain["over_vllm"]["ratio"] == hf[f"over_{peers.HF}"]["ratio"] == 1
    assert ours[f"over_{peers.HF}"]["ratio"] == 1.25 / 4 and ours["over_vllm"]["ratio"] == 1.25
    assert ours["median_s"] == 1.25 and ours["tokens_per_s"] == 8 * 32 / 1.25
    assert tables.peers(rows)[4].startswith("| batch | single pass cpp | 1.25 | 205 | 0.312 (")


def test_the_quick_form_is_the_gate_timed(order, capsys, tmp_path):
    out = tmp_path / "peers.json"
    assert peers.main(["--quick", "--out", str(out)]) == 0
    written = capsys.readouterr()
    document = json.loads(written.out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["quick"] and document["config"]["dtype"] == "float32"
    assert document["shapes"] == {"128x4": peers.TINY["128x4"]}


def test_the_real_form_measures_after_the_gate(monkeypatch, capsys):
    stages = []

    def measure(shape, dtype, asked, works, rounds, progress):
        stages.append((shape, dtype, works, rounds))
        names = [one.name for one in asked]
        samples = {(work, name): [1.0] * rounds for work in works for name in names}
        return {name: {} for name in names}, samples

    monkeypatch.setattr(peers, "measure", measure)
    assert peers.main(["--rounds", "5", "--shape", "768x12"]) == 0
    assert stages == [
        *((shape, "float32", peers.TINY_WORKLOADS, 3) for shape in peers.TINY.values()),
        (peers.SHAPES["768x12"], "bfloat16", peers.WORKLOADS, 5),
    ]
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not document["quick"] and document["shapes"] == {"768x12": peers.SHAPES["768x12"]}


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_quick_measurement_runs_end_to_end(tmp_path):
    document = run_benchmark("peers", tmp_path / "quick.json", "--quick")
    assert document["quick"]
