"""AliceAI's own format: what it claims, what its key counts, and the names of its tensors."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_alice_ai
from facts import TINY
from on_file import Sentence
from safetensors.torch import load_file, save_file

from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.resolve import resolve
from attnres_serve.verify.rewritten import alice_ai

BLOCK = "block_attn_res_block_size"
CONFIG = TINY["alice_ai"] | {BLOCK: 3}


def test_the_key_counts_layers() -> None:
    """Others of its kind are of older trainings; the keys of its own code may be stated."""
    older = {"attn_res_num_blocks": 7, "block_attn_res_mode": "window"}
    own = {"kda_allow_negative_eigenvalues": False, "router_bias_correction": True}
    result = resolve(CONFIG | older | own | {"router_score_function": "sigmoid"})
    assert result is not None and result.spec is not None
    assert (result.format, result.family) == ("alice_ai", "alice_ai")
    assert result.spec.block_starts == (0, 6)
    assert result.spec.final_mix and not {*older} & {*result.config}


def test_null_is_for_standard_residuals() -> None:
    result = resolve(CONFIG | {BLOCK: None})
    assert result is not None and result.spec is None


def test_a_missing_block_size(sentence: Sentence) -> None:
    sentence.raises(CheckpointError, resolve, TINY["alice_ai"])


@pytest.mark.parametrize(
    "changes",
    [
        *({BLOCK: odd} for odd in (0, -1, 2.0, True, "2", [2])),
        {"architectures": ["AnotherForCausalLM"]},
        {"model_type": "another"},
        {"routed_scaling_factor": 2.5},
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], sentence: Sentence) -> None:
    sentence.raises(CheckpointError, resolve, CONFIG | changes)


def test_the_first_site_alone_has_no_tensors(tmp_path: Path, sentence: Sentence) -> None:
    """A draft head may be there; it is counted, and changes nothing."""
    folder = write_alice_ai(tmp_path / "own", 4, 2)
    file = folder / "model.safetensors"
    whole = load_file(file)
    before = describe(check_folder(folder))
    draft = {"mtp.norm.weight": whole["model.norm.weight"].clone()}
    save_file(whole | draft, file, metadata={"format": "pt"})
    assert describe(check_folder(folder)) == before | {"left_aside": 1}
    for role, names in alice_ai.DEPTH_NAMES.items():
        name = names.format(3)
        assert name in whole, role
        rest = {key: tensor for key, tensor in whole.items() if key != name}
        save_file(rest, file, metadata={"format": "pt"})
        sentence.raises(CheckpointError, check_folder, folder)
    query = alice_ai.DEPTH_NAMES["attention_query"].format(0)
    extra = {query: whole["model.norm.weight"][None].clone()}
    save_file(whole | extra, file, metadata={"format": "pt"})
    sentence.raises(CheckpointError, check_folder, folder)


def test_the_house_format_has_them_all(tmp_path: Path) -> None:
    folder = write_alice_ai(tmp_path / "own", 4, 2)
    convert(str(folder), str(tmp_path / "house"), to_house=True)
    own, house = (check_folder(path) for path in (folder, tmp_path / "house"))
    assert own.parsed is not None and house.parsed is not None
    assert own.parsed.spec == house.parsed.spec
    assert len(house.headers) == len(own.headers) + 2
