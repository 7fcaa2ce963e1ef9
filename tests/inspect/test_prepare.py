"""A checkpoint to inspect, as far as it is known before an engine starts."""

import json
from types import SimpleNamespace

import pytest
from checkpoints import write_house

from attnres_serve.inspect import prepare

LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.fixture(autouse=True)
def a_tokenizer(monkeypatch):
    """Of one token for each word."""
    words = SimpleNamespace(encode=lambda text, **_: [*range(len(text.split()))], decode=str)
    monkeypatch.setattr(prepare.tokenizer, "load", lambda _: words)


@pytest.mark.parametrize(
    ("base", "options", "tokens"),
    [
        ("mamba2", {}, 2048),  # states none
        ("llama", {"max_positions": 64, "changes": LINEAR}, 128),
    ],
)
def test_the_longest_sequence_is_vllms(base, options, tokens, tmp_path):
    folder = str(write_house(tmp_path, base, layers=2, block_size=2, **options))
    if base == "mamba2":
        config = json.loads((tmp_path / "config.json").read_text())
        del config["max_position_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert prepare.opened(folder, None, []).longest == tokens
    assert prepare.opened(folder, 32, []).longest == 32


def test_a_name_in_a_file_of_flags(tmp_path):
    """It is that of the engine."""
    folder = str(write_house(tmp_path / "model", layers=2, block_size=2))
    (tmp_path / "flags.yaml").write_text("served-model-name: demo\n")
    flags = ["--config", str(tmp_path / "flags.yaml")]
    named = f"--served-model-name={folder}"
    assert named in prepare.opened(folder, None, []).flags
    assert named not in prepare.opened(folder, None, flags).flags
