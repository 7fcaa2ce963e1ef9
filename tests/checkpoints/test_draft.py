"""Draft models are checked by their files, as targets are."""

import json
from pathlib import Path
from shutil import copytree

import pytest
from checkpoints import GOLDENS, write_house
from serving import DEMO

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.draft import check_draft
from attnres_serve.errors import CheckpointError

TARGET = check_folder(DEMO).translated("demo")


def flags(model: Path, **config: object) -> list[str]:
    return ["--speculative-config", json.dumps({"model": str(model)} | config)]


def demo_with(folder: Path, **changes: object) -> Path:
    copytree(DEMO, folder)
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_draft_that_fits(tmp_path):
    check_draft(TARGET, flags(DEMO, method="draft_model"))
    plain = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attn_res": None}
    check_draft(TARGET, flags(demo_with(tmp_path / "plain", **plain)))
    check_draft(TARGET, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 9}, "layers.8"),
        ({"attn_res": {"block_size": 4, "gate": True}}, "gate"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ],
)
def test_a_draft_that_cannot_be_served(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        check_draft(TARGET, flags(demo_with(tmp_path / "draft", **changes)))


def test_another_vocabulary(tmp_path):
    """320 tokens of a house checkpoint, of a golden in FLA's format, and of a plain model."""
    changes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attn_res": None}
    plain = demo_with(tmp_path / "plain", vocab_size=64, **changes)
    house = write_house(tmp_path / "house", "llama", block_size=2)
    for draft in (plain, house, GOLDENS / "fla_transformer_block"):
        with pytest.raises(CheckpointError, match=r"vocabulary of \d+ tokens and the target"):
            check_draft(TARGET, flags(draft))


def test_what_is_left_to_vllm():
    """JSON that cannot be read, and methods without a model of their own."""
    check_draft(TARGET, ["--speculative-config", "{"])
    check_draft(TARGET, ["--speculative-config", '{"method": "ngram"}'])
