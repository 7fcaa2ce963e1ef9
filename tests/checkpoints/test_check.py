"""``attnres-serve check``: the facts, against numbers counted in another way, and the refusals.

The memory for weights is also held against vLLM's own model, in test_dry_run.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GOLDENS, edit, write_fla, write_house, write_standard
from cost import of_a_start
from hub import MODEL, cached
from on_file import Sentence
from safetensors.torch import load_file, save_file
from serving import DEMO

from attnres_serve import cli
from attnres_serve.compat import openai_server
from attnres_serve.verify.oracle import load, source_spans

WEIGHTS = "model.safetensors"
CHECKPOINTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "uneven": (write_house, {"base": "qwen3", "layers": 4, "block_starts": [0, 1, 5]}),
    "full": (write_house, {"base": "qwen2", "layers": 2, "block_size": 1}),
    "unmixed": (write_house, {"layers": 4, "block_size": 4, "final_mix": False}),
    "tied": (write_house, {"layers": 3, "block_size": 100, "tie": True, "kv_heads": 2}),
    "half": (write_house, {"block_size": 2, "dtype": "float16", "head_dim": 64}),
    "float32": (write_fla, {"block_size": 4, "dtype": "float32", "kv_heads": None}),
    "standard": (write_fla, {"block_size": None, "qk_norm": True}),
}


@pytest.fixture
def asked(capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run ``check``; its exit status and what it wrote to stdout and stderr."""

    def check(*arguments: object) -> tuple[int, str, str]:
        status = cli.main(["check", *map(str, arguments)])
        return status, *capfd.readouterr()

    return check


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_facts(name: str, tmp_path: Path, asked: Callable) -> None:
    """Counted from the tensors themselves and from the float64 model's idea of the sources."""
    write, options = CHECKPOINTS[name]
    write(tmp_path, **options)
    status, out, err = asked("--json", tmp_path)
    facts = json.loads(out)
    assert (status, err, facts["served"], facts["checkpoint"]) == (0, "", True, str(tmp_path))

    spec, tensors = load(tmp_path).spec, load_file(tmp_path / "model.safetensors")
    own = sum(t.numel() for n, t in tensors.items() if "_res_" in n or ".res_" in n)
    everything = sum(t.numel() for t in tensors.values())
    width = 2  # float32 is served in bfloat16 unless it is asked for
    sites = range(0 if spec.block_starts is None else spec.final + 1)
    sources = [0, *(1 + len(source_spans(spec.block_starts, site)) for site in sites)]
    assert facts["format"] == ("house" if write is write_house else "fla")
    assert facts["architecture"].startswith("AttnRes")
    assert (facts["hidden_size"], facts["layers"]) == (spec.hidden, spec.layers)
    assert facts["block_starts"] == list(spec.block_starts or ())
    assert facts["blocks"] == len(facts["block_starts"])
    assert facts["sites"] == len(sites)
    assert facts["sources"] == max(sources)
    assert (facts["parameters"], facts["attnres_parameters"]) == (everything, own)
    assert facts["stored_dtype"] == options.get("dtype", "bfloat16")
    assert facts["dtype"] == ("float16" if name == "half" else "bfloat16")
    assert facts["weights_bytes"] == width * (everything - own) + 4 * own
    bank = facts["bank_bytes_per_token"]
    assert bank == width * max(sources) * spec.hidden
    tokens = {"1": 8192, "2": 4096, "4": 2048, "8": 1024}
    assert facts["bank_bytes_of_8192_tokens"] == {n: bank * own for n, own in tokens.items()}
    attention = spec.sublayers["attention"]
    per_layer = 2 * attention.kv_heads * attention.head_dim
    assert facts["kv_cache_bytes_per_token"] == width * per_layer * spec.layers


@pytest.mark.parametrize(
    ("changed", "types", "says"),
    [
        ({}, ["bfloat16"], "stored in bfloat16, served"),
        ({"norm": torch.float32}, ["bfloat16", "float32"], "stored in bfloat16 and float32,"),
        ({"proj": torch.float32}, ["float32", "bfloat16"], "stored in float32 and bfloat16,"),
        (
            {"norm": torch.float32, "down_proj": torch.float16},
            ["bfloat16", "float16", "float32"],
            "stored in bfloat16, float16 and float32, served in bfloat16",
        ),
        ({"res_": torch.float32}, ["bfloat16", "float32"], "stored in bfloat16 and float32,"),
    ],
    ids=str,
)
def test_several_types(
    changed: dict[str, torch.dtype], types: list[str], says: str, tmp_path: Path, asked: Callable
) -> None:
    """All are named, whether tensors of the backbone have them or those of AttnRes."""
    write_house(tmp_path, layers=2, block_size=1)
    tensors = load_file(tmp_path / WEIGHTS)
    for part, dtype in changed.items():
        tensors |= {name: t.to(dtype) for name, t in tensors.items() if part in name}
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    facts = json.loads(asked("--json", tmp_path)[1])
    assert facts["stored_dtypes"] == types
    assert facts["stored_dtype"] == (types[0] if len(types) == 1 else "mixed")
    line = f"{'mixed, ' if len(types) > 1 else ''}{says}"
    assert line in asked(tmp_path)[1]


@pytest.mark.parametrize("name", sorted(folder.name for folder in GOLDENS.iterdir()))
def test_goldens(name: str, asked: Callable) -> None:
    """Every format is told from the others, and its blocks are those of the float64 model."""
    status, out, err = asked("--json", GOLDENS / name)
    facts, spec = json.loads(out), load(GOLDENS / name).spec
    formats = {
        "baseline": "baseline_attnres",
        "fla": "fla",
        "nanogpt": "nanogpt",
        "qwen3_attnres": "delta_attnres",
        "qwen3_attnres_cumulative": "open_attnres",
    }
    longest = max((start for start in formats if name.startswith(start)), key=len)
    assert (status, err, facts["format"]) == (0, "", formats[longest])
    assert facts["block_starts"] == list(spec.block_starts or ())
    assert facts["final_mix"] == spec.final_mix
    tensors = load_file(GOLDENS / name / "model.safetensors")
    for unread in facts["unread"]:
        del tensors[unread]
    assert facts["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    marks = ("_res_", ".res_", "_aggregator.")
    own = sum(t.numel() for n, t in tensors.items() if any(mark in n for mark in marks))
    assert facts["attnres_parameters"] == own


def test_for_a_person(asked: Callable) -> None:
    """One fact a line, in units that can be read."""
    status, out, err = asked(DEMO)
    lines = out.splitlines()
    assert (status, err, lines[0]) == (0, "", f"{DEMO} can be served.")
    assert "format        house" in lines
    assert "blocks        4, beginning at the sublayers 0, 4, 8, 12" in lines
    assert "sites         17, of at most 5 sources" in lines
    assert "parameters    3,647,040, of them 6,528 of AttnRes itself" in lines
    assert "weights       7.3 MB of memory" in lines
    assert "block bank    1.9 kB for every token of a step" in lines


def test_what_is_not_as_usual(tmp_path: Path, asked: Callable) -> None:
    """The other functions are told in one line, and only where there is one."""
    options = {"recency_bias": True, "logit_scale": 0.5, "shared_queries": "block"}
    varied = write_house(tmp_path / "varied", block_size=4, attn_res=options)
    line = "variant       recency bias, logit scale 0.5, one query for every block"
    assert line in asked(varied)[1].splitlines()
    facts = json.loads(asked("--json", varied)[1])
    assert facts.items() >= (options | {"cumulative": False}).items()
    out = asked(GOLDENS / "qwen3_attnres_cumulative_block")[1]
    assert "variant       cumulative sums, recency bias" in out.splitlines()
    usual = write_house(tmp_path / "usual", block_size=4, attn_res={"logit_scale": 1})
    assert "variant" not in asked(usual)[1] + asked(DEMO)[1]
    standard = json.loads(asked("--json", write_fla(tmp_path / "standard", block_size=None))[1])
    assert {standard[key] for key in (*options, "cumulative")} == {None}


@pytest.mark.parametrize(
    ("blocks", "size", "notes"),
    [
        ({"block_size": 4}, "4 sublayers (2 layers) a block", []),
        ({"block_size": 2}, "2 sublayers (1 layer) a block", []),
        ({"block_size": 1}, "1 sublayer a block", []),  # Full AttnRes
        ({"block_size": 3}, "3 sublayers a block", ["in the middle of layers, at sublayer 3;"]),
        ({"block_size": 5}, "5 sublayers a block", ["in the middle of layers, at sublayer 5;"]),
        ({"block_size": 6}, "6 sublayers (3 layers) a block", ["one block holds all 6 sublayers"]),
        ({"block_size": 99}, "6 sublayers (3 layers) a block", ["one block holds all 6 sublayers"]),
        ({"block_starts": [0, 4]}, "4 sublayers (2 layers) a block", []),
        ({"block_starts": [0, 2]}, "from 2 to 4 sublayers a block", []),
        ({"block_starts": [0, 1, 5]}, "from 1 to 4 sublayers a block", ["at sublayers 1, 5;"]),
        # Of layers with one sublayer.
        ({"base": "mamba2", "layers": 4, "block_size": 2}, "2 sublayers (2 layers) a block", []),
    ],
    ids=str,
)
def test_the_size_of_blocks(
    blocks: dict, size: str, notes: list[str], tmp_path: Path, asked: Callable
) -> None:
    """In both units, and with a note about what is seldom meant."""
    out = asked(write_house(tmp_path, **blocks))[1]
    assert f"block size    {size}" in out.splitlines()
    result = [line for line in out.splitlines() if line.startswith("note ")]
    assert len(result) == len(notes)
    assert all(note in line for note, line in zip(notes, result, strict=True))


def test_for_a_person_full_and_standard(tmp_path: Path, asked: Callable) -> None:
    """Full AttnRes has no list of starts; standard residuals have neither sites nor a bank."""
    full = asked(GOLDENS / "fla_transformer_full")[1]
    assert "blocks        6, one for every sublayer (Full AttnRes)" in full
    out = asked(write_fla(tmp_path, block_size=None))[1]
    assert "blocks        none (standard residuals)" in out
    assert "sites" not in out and "bank" not in out and "block size" not in out


def test_left_overs_are_not_counted(tmp_path: Path, asked: Callable) -> None:
    """A rotary table and the copy of a tied head are never loaded."""
    write_fla(tmp_path, tie=True)
    before = asked("--json", tmp_path)[1]

    def add(tensors: dict) -> None:
        table = "model.layers.0.attn.rotary.rotary_emb.inv_freq"
        tensors[table] = tensors["model.norm.weight"].clone()
        tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()

    edit(tmp_path, add)
    assert asked("--json", tmp_path)[1] == before


def test_quantised_weights_are_not_called_parameters(tmp_path: Path, asked: Callable) -> None:
    """Packed elements are counted in bytes only."""
    write_house(tmp_path, block_size=2, dtype="float32")
    edit(tmp_path, quantization_config={"quant_method": "compressed-tensors"})
    facts = json.loads(asked("--json", tmp_path)[1])
    stored = sum(4 * t.numel() for t in load_file(tmp_path / "model.safetensors").values())
    assert facts["parameters"] is None and facts["weights_bytes"] == stored
    assert "parameters    not counted (quantised)" in asked(tmp_path)[1]


# --- refusals


@pytest.mark.parametrize(
    "write",
    [lambda folder: None, write_standard, lambda folder: (write_fla(folder) / WEIGHTS).unlink()],
    ids=["no such folder", "no AttnRes", "no weights"],
)
def test_says_what_serve_says(
    write: Callable, tmp_path: Path, asked: Callable, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sentence from the same judge; the exit status is 1, not an error's 2."""
    monkeypatch.setattr(
        openai_server, "run_server", lambda *arguments: pytest.fail("it was served")
    )
    folder = tmp_path / "checkpoint"
    write(folder)
    status, out, err = asked(folder)
    assert (status, out) == (1, "")
    assert err.startswith("attnres-serve: ") and err.count("\n") == 1
    assert cli.main(["serve", str(folder)]) == 2
    assert capfd.readouterr().err == err
    status, out, again = asked("--json", folder)
    assert (status, again) == (1, err)
    answer = json.loads(out)
    assert answer["served"] is False and f"attnres-serve: {answer['reason']}\n" == err


@pytest.mark.parametrize("arguments", [["a", "b"], ["a", "--jsn"], ["a", "--port", "1"]])
def test_wrong_usage(
    arguments: list[str], capfd: pytest.CaptureFixture, sentence: Sentence
) -> None:
    """vLLM's flags are for serve alone."""
    assert cli.main(["check", *arguments]) == 2
    sentence.check(capfd.readouterr().err)


def test_no_checkpoint() -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["check"])
    assert error.value.code == 2


@pytest.mark.parametrize("arguments", [["check", str(DEMO)], ["convert", str(DEMO), "out"]])
def test_an_environment_without_vllm(arguments: list[str], tmp_path: Path) -> None:
    """What the package itself does not depend on is asked for by name."""
    script = "import sys; sys.modules['safetensors'] = None; from attnres_serve import cli; "
    words = [sys.executable, "-c", f"{script} sys.exit(cli.main(sys.argv[1:]))", *arguments]
    child = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert child.returncode == 2 and child.stderr.count("\n") == 1
    assert "safetensors is not installed; install vLLM" in child.stderr


@pytest.mark.parametrize(("options", "unbuffered"), [([], ""), (["--json"], "1")])
def test_a_reader_that_stops_listening(options: list[str], unbuffered: str) -> None:
    """As `| head` does: no stack trace, and the status of a program that the closed pipe ends."""
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.run(
        [sys.executable, "-m", "attnres_serve", "check", str(DEMO), *options],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writing)
    assert (child.returncode, child.stderr) == (141, "")


# --- Hugging Face ids


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_in_the_cache(cache: Path, asked: Callable) -> None:
    """Judged whole, tensors included."""
    cached(cache, GOLDENS / "fla_transformer_block")
    status, out, _ = asked(MODEL)
    assert status == 0 and out.startswith(f"{MODEL} can be served.")
    assert "parameters    196,672" in out


def test_a_model_that_is_not_in_the_cache(cache: Path, asked: Callable, sentence: Sentence) -> None:
    """Nothing is fetched, and the sentence says how to."""
    for name in ("lab/model", "lab"):
        status, _, err = asked(name)
        assert status == 1
        sentence.check(err)


def test_a_model_of_which_only_a_part_is_in_the_cache(
    cache: Path, asked: Callable, sentence: Sentence
) -> None:
    """vLLM would fetch the rest; there is nothing to judge yet."""
    snapshot = cached(cache, GOLDENS / "fla_transformer_block", WEIGHTS)
    status, _, err = asked(MODEL)
    assert status == 1
    sentence.check(err)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    status, _, err = asked(MODEL)
    assert status == 1
    sentence.check(err)


@pytest.mark.parametrize(
    "arguments", [["check", str(DEMO)], ["check", "--json", str(DEMO)], ["--help"], ["--version"]]
)
def test_answers_at_once(arguments: list[str]) -> None:
    """Nothing heavy is imported, and it takes less than the import of torch would."""
    script = """
import json, sys, time
from attnres_serve import cli
try:
    cli.main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "vllm", "transformers"} & set(sys.modules)
print(json.dumps([time.process_time(), sorted(heavy)]), file=sys.stderr)
"""
    words = [sys.executable, "-c", script, *arguments]
    child = subprocess.run(words, capture_output=True, text=True, check=True)
    seconds, heavy = json.loads(child.stderr)
    assert heavy == [] and seconds < of_a_start()
