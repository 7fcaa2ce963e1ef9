"""Queries under the config.json of a plain model: which keys to set, and a command that does it."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit, write_house, write_standard
from on_file import Sentence
from safetensors.torch import load_file

from attnres_serve import cli
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.families import FAMILIES

WEIGHTS = "model.safetensors"
LATER = ("check", "serve", "convert", "add")


def write_plain(folder: Path, base: str, **options: Any) -> Path:
    """A house checkpoint whose config.json is its family's."""
    write_house(folder, base, **options)
    architecture = FAMILIES[base].stock_architecture
    return edit(folder, without=("attn_res",), model_type=base, architectures=[architecture])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "own", "llama", layers=2, block_size=2)


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture, sentence: Sentence) -> Callable[..., str]:
    """Run a command that is refused in the line on file; returns that line."""

    def run(command: str, folder: Path, *options: str) -> str:
        target = [str(tmp_path / "never")] if command in ("convert", "add") else []
        added = ["--add-zero-queries", "--block-size", "4"] if command == "add" else []
        words = ["convert" if command == "add" else command, str(folder), *target, *added, *options]
        capfd.readouterr()
        assert cli.main(words) == (1 if command == "check" else 2)
        _, err = capfd.readouterr()
        assert len(err) <= 600
        return sentence.check(err)

    return run


def stated(message: str) -> dict[str, Any]:
    """The three keys of config.json that a sentence says, with a block size of 4."""
    result = re.search(
        r"set model_type to (.+), architectures to (.+) and attn_res to (.+?\})", message
    )
    assert result is not None
    values = [text.replace("S}", "4}").replace("S,", "4,") for text in result.groups()]
    keys = ("model_type", "architectures", "attn_res")
    return dict(zip(keys, map(json.loads, values), strict=True))


@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2"])
def test_both_ways_lead_to_a_served_checkpoint(
    base: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Every command says the same; the keys by hand and the advised command are accepted."""
    folder = write_plain(tmp_path / "own", base, layers=4, block_size=4)
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    message = [refused(command, folder) for command in LATER]
    for line in message:
        assert stated(line) == {
            "model_type": f"attnres_{base}",
            "architectures": [FAMILIES[base].architecture],
            "attn_res": {"block_size": 4},
        }
        (command,) = re.findall(r"`attnres-serve (.+?)`", line)
        words = [{"DST": str(tmp_path / "t"), "S": "4"}.get(w, w) for w in shlex.split(command)]
        words[2] = str(tmp_path / "t")
        assert words[3:] == ["--block-size", "4"]
    assert cli.main(words) == 0
    written = json.loads((tmp_path / "t" / "config.json").read_text())
    assert written == config | stated(message[0])
    result = load_file(tmp_path / "t" / WEIGHTS)
    assert result.keys() == tensors.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())
    by_command = check_folder(tmp_path / "t").translated("t")
    edit(folder, **stated(message[0]))
    assert check_folder(folder).translated("own") == by_command
    assert by_command.spec.block_starts == (0, 4)


OTHERS: dict[str, dict[str, Any]] = {
    "recency biases": {"block_size": 4, "attn_res": {"recency_bias": True}},
    "no final mix": {"block_size": 4, "final_mix": False},
    "one query for a layer": {"block_size": 4, "attn_res": {"shared_queries": "layer"}},
    "one query for a block": {"block_starts": [0, 2, 5], "attn_res": {"shared_queries": "block"}},
    "all": {
        "block_size": 4,
        "final_mix": False,
        "attn_res": {"recency_bias": True, "shared_queries": "layer"},
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_options_that_the_tensors_tell(
    kind: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """They are among the keys, and no command writes them: sums may be cumulative too."""
    options = OTHERS[kind]
    folder = write_plain(tmp_path / "own", "llama", layers=4, **options)
    message = [refused(command, folder) for command in LATER]
    message.append(refused("convert", folder, "--block-size", "4"))
    expected = {k: v for k, v in options.items() if k != "attn_res"} | options.get("attn_res", {})
    for line in message:
        assert stated(line)["attn_res"] == expected
    edit(folder, **stated(message[0]))
    assert check_folder(folder).parsed is not None


def test_pickles(own: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    torch.save(load_file(own / WEIGHTS), own / "pytorch_model.bin")
    (own / WEIGHTS).unlink()
    for command in LATER:
        refused(command, own)
    assert cli.main(["convert", str(own), str(tmp_path / "t"), "--block-size", "2"]) == 0
    assert check_folder(tmp_path / "t").parsed is not None


def test_together_with_renames(own: Path, tmp_path: Path) -> None:
    edit(own, lambda t: t.update({"output.weight": t.pop("lm_head.weight")}))
    words = ["convert", str(own), str(tmp_path / "t"), "--block-size", "2"]
    assert cli.main(words) == 2
    assert cli.main([*words, "--rename", "output=lm_head"]) == 0
    assert check_folder(tmp_path / "t").parsed is not None


def test_attn_res_that_config_json_has(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Only the other two keys are to be set."""
    folder = write_plain(tmp_path / "own", "qwen3", layers=2, block_size=2)
    edit(folder, attn_res={"block_size": 2})
    for command in LATER:
        refused(command, folder)
    edit(folder, model_type="attnres_qwen3", architectures=["AttnResQwen3ForCausalLM"])
    assert check_folder(folder).parsed is not None


def test_another_function_gets_no_advice(own: Path, refused: Callable[..., str]) -> None:
    edit(own, lambda t: t.update({"model.layers.0.attn_res_gate": torch.zeros(64)}))
    for command in LATER:
        refused(command, own)


@pytest.mark.parametrize("size", ["0", "-1"])
def test_sizes_that_are_none(size: str, own: Path, refused: Callable[..., str]) -> None:
    refused("convert", own, "--block-size", size)


def test_a_plain_model_without_queries(tmp_path: Path, refused: Callable[..., str]) -> None:
    """It is offered zero ones, as ever."""
    folder = write_standard(tmp_path / "own")
    refused("convert", folder, "--block-size", "2")
    refused("check", folder)
    words = ["convert", str(folder), str(tmp_path / "t"), "--add-zero-queries", "--block-size", "2"]
    assert cli.main(words) == 0


def test_blocks_that_are_stated(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = write_house(tmp_path / "own", layers=2, block_size=2)
    refused("convert", folder, "--block-size", "2")
