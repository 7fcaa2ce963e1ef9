"""``attnres-serve verify``: holds on goldens, fails on every damage and says where it is."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import (
    house_copy_of_fla,
    write_fla,
    write_house,
    write_kimi_names,
    write_mode,
    write_nanogpt,
    write_standard,
    write_titan,
)
from safetensors.torch import load_file, save_file
from serving import GOLDENS, environment, expected, run_verify

from attnres_serve import checkpoint, cli, oracle, verify
from attnres_serve.errors import CheckpointError

BLOCK = "fla_transformer_block"
CUMULATIVE = "qwen3_attnres_cumulative_block"
INTACT = (BLOCK, CUMULATIVE, "nanogpt_block")


def damaged(golden: str, folder: Path, edit) -> Path:
    """A copy whose tensors were edited."""
    shutil.copytree(GOLDENS / golden, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def perturb_a_query(tensors: dict) -> None:
    tensors["model.layers.1.mlp_res_proj.weight"][0, 7] += 0.25


def swap_norms(tensors: dict) -> None:
    first, second = (f"model.layers.2.{kind}_norm.weight" for kind in ("attn", "mlp"))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def scale_a_matrix(tensors: dict) -> None:
    tensors["model.layers.3.attn.o_proj.weight"] *= 1.01


def raise_a_bias(tensors: dict) -> None:
    tensors["model.layers.4.attn_res_bias"] += 0.25


def moved_boundary(folder: Path) -> Path:
    """The house copy of a golden whose second block begins a sublayer later."""
    house_copy_of_fla(GOLDENS / BLOCK, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["attn_res"]["block_size"] == 4 and config["num_hidden_layers"] == 5
    config["attn_res"].pop("block_size")
    config["attn_res"]["block_starts"] = [0, 5, 8]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("verify")
    served = {name: (GOLDENS / name, name) for name in INTACT}
    for edit in (perturb_a_query, swap_norms, scale_a_matrix):
        served[edit.__name__] = damaged(BLOCK, folder / edit.__name__, edit), BLOCK
    served["raise_a_bias"] = damaged(CUMULATIVE, folder / "bias", raise_a_bias), CUMULATIVE
    served["moved_boundary"] = moved_boundary(folder / "moved"), BLOCK
    jobs = [
        {
            "served": str(path),
            "reference": str(GOLDENS / golden),
            "prompts": [case["prompt"] for case in expected(GOLDENS / golden)[1:3]],
            "chosen": {"attnres_algorithm": ("two_phase", "single_pass")[number % 2]},
            "dtype": "float32",
        }
        for number, (path, golden) in enumerate(served.values())
    ]
    return dict(zip(served, run_verify(jobs, folder), strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("name", INTACT)
def test_a_golden_holds(name, reports):
    report = reports[name]
    assert report["holds"] and not report["parts"] and report["greedy_agreement"] == 1
    assert report["tokens"] == sum(len(case["prompt"]) for case in expected(GOLDENS / name)[1:3])
    # Far inside the bounds, so that these are not what hides a fault.
    assert 0 < report["worst_error"] < 1e-5 and 0 <= report["kl"] < 1e-9
    assert 0 < report["logprob_gap"] < 1e-4


@pytest.mark.engine
@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        ("perturb_a_query", ["the site of the MLP of layer 1"]),
        ("swap_norms", ["the site of the attention of layer 2", "the site of the MLP of layer 2"]),
        ("scale_a_matrix", ["the attention of layer 3"]),
        ("raise_a_bias", ["the site of the attention of layer 4"]),
        (
            # Up to site 5 both have the same sources; nothing but sites is wrong after it.
            "moved_boundary",
            [
                "the site of the MLP of layer 2",
                *(
                    f"the site of the {kind} of layer {layer}"
                    for layer in (3, 4)
                    for kind in ("attention", "MLP")
                ),
                "the site of the final norm",
            ],
        ),
    ],
)
def test_damage_is_named(damage, parts, reports):
    report = reports[damage]
    assert not report["holds"]
    assert list(report["parts"]) == parts
    assert report["worst_part"] in parts and report["worst_error"] > 1e-3


@pytest.mark.engine
@pytest.mark.versions
def test_the_command(tmp_path):
    """A report a person can read, an exit status, and one JSON object on request."""
    folder = damaged(BLOCK, tmp_path / "damaged", perturb_a_query)
    command = [sys.executable, "-m", "attnres_serve", "verify", str(folder), "--tokens", "20"]
    command += ["--reference", str(GOLDENS / BLOCK)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "the site of the MLP of layer 1" in done.stdout and "DOES NOT HOLD" in done.stdout


def test_the_hugging_face_class_is_a_reference(tmp_path):
    """Where transformers has the class; where it has not, a sentence."""
    write_standard(tmp_path / "standard", base="qwen3")
    ids = list(range(3, 20))
    found = verify._hugging_face(tmp_path / "standard")(ids)
    wanted = oracle.load(tmp_path / "standard").logprobs(ids)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(CheckpointError, match="--against fp64"):
        verify._hugging_face(GOLDENS / CUMULATIVE)


def refused(capsys, *arguments: str) -> str:
    assert cli.main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("attnres-serve: ") and err.count("\n") == 1
    return err


def test_refusals(capsys, tmp_path):
    golden = str(GOLDENS / BLOCK)
    assert "does not exist" in refused(capsys, str(tmp_path / "none"))
    assert "--tokens is 1" in refused(capsys, golden, "--tokens", "1")
    assert "cannot be read" in refused(capsys, golden, "--text", str(tmp_path / "none"))
    short = tmp_path / "short"
    short.write_text("Four words of text.")
    assert "a longer one" in refused(capsys, golden, "--text", str(short))
    bare = shutil.copytree(golden, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "tokenizer" in refused(capsys, str(bare))


def test_nothing_to_verify(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    folder = write_standard(tmp_path)
    assert cli.main(["verify", str(folder)]) != 0
    assert f"{folder} is not an AttnRes checkpoint" in capfd.readouterr().err


def test_what_the_float64_model_does_not_know(tmp_path: Path) -> None:
    """Quantised weights are served, but there is nothing to compare them with."""
    folder = write_house(tmp_path, block_size=2)
    tensors = load_file(folder / "model.safetensors")
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    save_file(tensors | {scale: torch.ones(96, 1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be evaluated in float64 \(.*weight_scale"):
        verify._reference(folder, "fp64")


@pytest.mark.parametrize("write", [write_nanogpt, lambda f: write_kimi_names(f, block_layers=1)])
def test_nobody_is_asked_to_run_code(
    write: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These checkpoints bring some along, and their tokenizers need none of it."""
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(prompt))
    assert verify.passages(write(tmp_path), None, 8, 1)


def edit(folder: Path, **changes: object) -> Path:
    """Change keys of config.json; None takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_house(folder, "llama", block_size=2),
        lambda folder: write_house(folder, "qwen2", block_size=2),
        lambda folder: write_house(folder, "qwen3", block_size=2),
        lambda folder: write_kimi_names(folder, block_layers=1),
        write_fla,
        write_mode,
        write_nanogpt,
        write_titan,
    ],
    ids=["llama", "qwen2", "qwen3", "qwen3_ar", "fla", "delta_attnres", "nanogpt", "torchtitan"],
)
def test_keys_that_serving_does_without(write: Callable, tmp_path: Path) -> None:
    """The float64 model does without them too, and has the same value in their place."""
    folder = write(tmp_path)
    text = (folder / "config.json").read_text()
    for key in json.loads(text):
        (folder / "config.json").write_text(text)
        edit(folder, **{key: None})
        try:
            translation = checkpoint.examine(folder).translation
        except CheckpointError:
            continue
        if translation is not None and translation.spec is not None:
            spec = oracle.load(folder).spec
            assert spec.eps == translation.config.get("rms_norm_eps", 1e-6), key
            assert spec.key_norm_eps == translation.spec.key_norm_eps, key
