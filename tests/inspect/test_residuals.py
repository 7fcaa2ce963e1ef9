"""``inspect --magnitudes --against``: a model with standard residuals, against Hugging Face's class
in float64, and what is refused."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import write_fla, write_standard
from checkpoints.hugging_face import tiny
from jobs import fresh_prompts
from refusals import refused
from serving import DEMO, GOLDENS, run_module

from attnres_serve.bench import baseline
from attnres_serve.checkpoints import tokenizer
from attnres_serve.depth.layout import Layout
from attnres_serve.families import FAMILIES

pytest.importorskip("vllm")

from in_process import vllm_config, world
from random_checkpoint import write_plain
from trace_cases import FAR, worker_of
from transformers import AutoModelForCausalLM
from vllm.config import set_current_vllm_config

from attnres_serve.inspect import residuals
from attnres_serve.worker import WorkerExtension

LENGTH, CHUNK = 37, 16


@pytest.fixture(scope="module", autouse=True)
def one_world():
    with world(GOLDENS / "fla_transformer_full"):
        yield


def judged(folder: Path, layout: Layout, ids: list[int]) -> tuple[list[np.ndarray], ...]:
    """RMS ``[T]`` of what is added to the stream before each norm, and of the stream."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    streams: list[torch.Tensor] = []
    for path in layout.norms:
        norm = model.model.get_submodule(path)
        norm.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0][0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    added = [streams[0], *(b - a for a, b in pairwise(streams))]
    each = [[part.square().mean(-1).sqrt().numpy() for part in parts] for parts in (added, streams)]
    return each[0], each[1]


def measured(folder: Path, layout: Layout, ids: list[int]) -> dict:
    worker = worker_of(folder, "two_phase", "cpp", CHUNK)
    with set_current_vllm_config(worker.vllm_config):
        answer = WorkerExtension.attn_res_magnitudes(worker, ids, layout.norms)
    modules = worker.model_runner.get_model().modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return answer


def check(answer: dict, wanted: tuple[list[np.ndarray], ...]) -> None:
    assert answer["problem"] is None
    assert [index for index, *_ in answer["sites"]] == list(range(len(wanted[0])))
    for index, *parts in answer["sites"]:
        for part, own in zip(parts, wanted, strict=True):
            found = np.frombuffer(part, np.float32)
            np.testing.assert_allclose(found, own[index], atol=FAR, rtol=FAR)


@pytest.mark.parametrize("base", ["llama", "gemma2", "glm4"])
def test_equals_hugging_faces_class(base, tmp_path):
    """In chunks, with norms of weight 1 + w, and with further norms behind the sublayers."""
    config = tiny(base)
    folder, layout = write_plain(tmp_path / base, config), FAMILIES[base].layout(config)
    (ids,) = fresh_prompts((LENGTH,))
    check(measured(folder, layout, ids), judged(folder, layout, ids))


def test_a_format_with_its_depth_attention_off(tmp_path):
    """Our own class of a model, without sites, is vLLM's."""
    folder, twin = write_fla(tmp_path / "off", block_size=None), tmp_path / "twin"
    source = baseline.read(str(folder), has_weights=True)
    baseline.write_twin(source, twin)
    (ids,) = fresh_prompts((LENGTH,))
    layout = source.parsed.layout
    check(measured(folder, layout, ids), judged(twin, layout, ids))


def test_another_convention_is_refused(tmp_path):
    """vLLM's Granite adds by itself, and gives a norm the stream alone."""
    config = tiny("granite")
    folder, layout = write_plain(tmp_path, config), FAMILIES["granite"].layout(config)
    answer = measured(folder, layout, fresh_prompts((5,))[0])
    assert answer["sites"] == []
    assert answer["problem"].startswith(
        "layers.0.post_attention_layernorm of vLLM's GraniteForCausalLM does not add what it "
        "receives to the residual of the norm before it, so"
    )


def listened(monkeypatch, *, scale=1.0, norms=(0, 1, 2), wish=(0, 1, 2)) -> dict:
    """What is measured of a decoder that scales its residual, and runs some norms."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(vllm_config(GOLDENS / "fla_transformer_full")):
        own = {number: RMSNorm(8, dtype=torch.float32) for number in wish}

    def replay(worker, ids) -> int:
        hidden = torch.ones(len(ids), 8)
        residual = None if 0 in norms else hidden.clone()  # of the stage before
        for number in norms:
            if residual is None:
                hidden, residual = own[number](hidden), hidden
            else:
                hidden, residual = own[number](hidden, residual * scale)
        return 1

    monkeypatch.setattr(residuals.decoder, "norms_here", lambda model, paths: own)
    monkeypatch.setattr(residuals.replay, "replay", replay)
    model = SimpleNamespace()
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    return residuals.measure(worker, [5, 6], ["a", "b", "c"])


def test_a_stream_that_is_changed_between_norms_is_refused(monkeypatch):
    """By a scale, or by a norm that is left out."""
    assert [*listened(monkeypatch)] == [0, 1, 2]
    assert [*listened(monkeypatch, wish=(1, 2), norms=(1, 2))] == [1, 2]
    with pytest.raises(residuals.TraceError, match="b of vLLM's SimpleNamespace does not add"):
        listened(monkeypatch, scale=0.5)
    with pytest.raises(residuals.TraceError, match="a norm of vLLM's SimpleNamespace does not add"):
        listened(monkeypatch, norms=(0, 1))


# The command.


def test_a_refusal_is_one_sentence(tmp_path, capsys):
    """Before an engine starts."""
    ours, plain = write_fla(tmp_path / "ours"), write_standard(tmp_path / "plain", layers=2)
    other = write_standard(tmp_path / "other", changes={"architectures": ["LlamaModel"]})
    words = ["inspect", str(ours), "--magnitudes", "--prompt", "a", "--against"]
    for further, sentence in (
        ([str(plain)], f"{ours} has 6 sublayers and {plain} 4; expected two checkpoints with"),
        ([str(other)], f"{other} cannot be measured: found model_type 'llama'"),
        ([str(ours)], "both sides are the same"),
        ([str(DEMO)], "expected two checkpoints with the same sublayers"),
        (["no/such/one"], "no/such/one does not exist"),
        ([str(plain), "--against-text", "t"], "--against-text does not go with --magnitudes"),
    ):
        assert sentence in refused(capsys, *words, *further)
    said = refused(capsys, "inspect", str(plain), "--magnitudes", "--prompt", "a")
    assert "is not an AttnRes checkpoint" in said


@pytest.mark.engine
@pytest.mark.exhaustive
def test_two_checkpoints(tmp_path):
    """Two engines, vLLM's own class in the second, each with the ids of its own tokenizer."""
    ours, plain = write_fla(tmp_path / "ours"), write_standard(tmp_path / "plain")
    text = "def push(self, items):\n    return 17 + items\n"
    paths = tmp_path / "x.npz", tmp_path / "x.png"
    words = ["--magnitudes", "--prompt", text, "--against", str(plain), "--dtype", "float32"]
    words += ["--numbers", str(paths[0]), "--out", str(paths[1])]
    said = run_module("attnres_serve", "inspect", str(ours), *words, timeout=300)
    assert said.endswith(f"{paths[0]}\n{paths[1]}\n")
    found, layout = np.load(paths[0]), FAMILIES["llama"].layout({"num_hidden_layers": 3})
    added, streams = judged(plain, layout, tokenizer.load(plain).encode(text))
    for name, parts in (("output", added[1:]), ("mix", streams)):
        means = [part.mean() for part in parts]
        own = found[f"second_{name}_mean"][: len(means)]
        np.testing.assert_allclose(own, means, atol=FAR, rtol=FAR)
    assert np.abs(found["first_mix_mean"] - found["second_mix_mean"]).max() > 100 * FAR
    assert paths[1].read_bytes().startswith(b"\x89PNG")
