"""A state_dict of transformers' own class that was saved by itself: packed experts, other names."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoints import write_house
from checkpoints.hugging_face import tiny, write_tiny
from facts import TINY
from on_file import Sentence
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import house

WEIGHTS = "model.safetensors"
OF_CLASSES = [name for name in TINY if FAMILIES[name].has_hf_class]
CHANGED = [name for name in OF_CLASSES if FAMILIES[name].in_memory(tiny(name))]
PACKED = [
    name
    for name in CHANGED
    if any(len(held.parts) > 1 for held in FAMILIES[name].in_memory(tiny(name)).values())
]


def in_memory(name: str, folder: Path) -> dict[str, Tensor]:
    """What the class holds after it has read a checkpoint."""
    own = CONFIG_MAPPING[name].from_dict(tiny(name))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)].from_pretrained(folder, dtype="auto")
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


def test_families_that_are_packed() -> None:
    """The experts of some classes are on disk as in memory."""
    mixtures = {
        name for name in OF_CLASSES if "experts" in str([*FAMILIES[name].shapes(tiny(name))])
    }
    assert {*PACKED} == mixtures - {"gpt_oss", "llama4_text"}


@pytest.mark.parametrize("name", CHANGED)
def test_every_number_comes_back(name: str, tmp_path: Path) -> None:
    """What transformers read of a checkpoint, taken apart, is that checkpoint to the bit."""
    folder = write_tiny(tmp_path / name, name, 4, 3, 1.0, "float32", {})
    config, state = tiny(name), in_memory(name, folder)
    index = TensorIndex(house.FORMAT, BaseTensors(name, config), None)
    actual = {part: piece for own in state for part, piece in index.pieces(own, state[own])}
    expected = load_file(folder / WEIGHTS)
    if config["tie_word_embeddings"]:
        actual.pop("lm_head.weight", None)
    assert actual.keys() == expected.keys()
    assert any(own not in expected for own in state)
    for part, piece in actual.items():
        assert torch.equal(piece, expected[part]), part


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "granitemoe", "lfm2_moe"])
def test_it_is_served_and_converted(name: str, tmp_path: Path) -> None:
    """An ordinary model gets queries; one with queries is served as it is."""
    folder = write_tiny(tmp_path / "own", name, 4, 3, 1.0, "float32", {})
    usual, state = load_file(folder / WEIGHTS), in_memory(name, folder)
    if tiny(name)["tie_word_embeddings"]:
        del state["lm_head.weight"]  # which the embedding stands for
    save(folder, state)
    convert(str(folder), str(tmp_path / "with"), zero_queries_block_size=2)
    result = load_file(tmp_path / "with" / WEIGHTS)
    assert {name for name in result if "_res_" not in name} == usual.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in usual.items())
    own = write_house(tmp_path / "house", name, layers=4, block_size=3)
    queries = {k: v for k, v in load_file(own / WEIGHTS).items() if "_res_" in k}
    save(own, state | queries)
    assert check_folder(own).parsed is not None
    torch.save(state | queries, own / "pytorch_model.bin")
    (own / WEIGHTS).unlink()
    convert(str(own), str(tmp_path / "pickled"))
    assert load_file(tmp_path / "pickled" / WEIGHTS).keys() == {*state, *queries}


def packed(tmp_path: Path, name: str, **changes: object) -> tuple[Path, dict[str, Tensor]]:
    """A house checkpoint with the experts of its first sparse layer packed."""
    folder = write_house(tmp_path / name, name, layers=4, block_size=3, changes=changes)
    tensors = load_file(folder / WEIGHTS)
    one = next(key for key in tensors if ".experts.0.down_proj" in key)
    stem, _, _ = one.partition("0.down_proj")
    experts = {key: tensors.pop(key) for key in [*tensors] if key.startswith(stem)}
    count = len({key.removeprefix(stem).partition(".")[0] for key in experts})
    of = {
        part: [experts[f"{stem}{number}.{part}_proj.weight"] for number in range(count)]
        for part in ("gate", "up", "down")
    }
    both = [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
    tensors[f"{stem}gate_up_proj"] = torch.stack(both)
    tensors[f"{stem}down_proj"] = torch.stack(of["down"])
    return folder, tensors


@pytest.mark.parametrize("name", ["alice_ai", "bailing_moe", "bailing_hybrid"])
def test_a_family_of_no_class_is_refused(name: str, tmp_path: Path, sentence: Sentence) -> None:
    """How such experts were packed is known of transformers' own classes alone."""
    folder, tensors = packed(tmp_path, name)
    save(folder, tensors)
    sentence.raises(CheckpointError, check_folder, folder)


def test_packed_experts_of_another_layout_are_refused(tmp_path: Path, sentence: Sentence) -> None:
    """As gpt-oss and Llama 4 have them, and one expert too few; one weight in both forms; none."""
    folder, tensors = packed(tmp_path, "qwen3_moe")
    name = next(key for key in tensors if key.endswith("experts.gate_up_proj"))
    save(folder, tensors)
    assert check_folder(folder).parsed is not None
    one = name.replace("gate_up_proj", "0.up_proj.weight")
    whole = tensors[name]
    others = [{name: other} for other in (whole.mT[:, :, :-1], whole[1:], whole[0])]
    for changed in (*others, {one: whole[0, : whole.shape[1] // 2]}):
        save(folder, tensors | changed)
        sentence.raises(CheckpointError, check_folder, folder)
    save(folder, {key: tensor for key, tensor in tensors.items() if key != name})
    sentence.raises(CheckpointError, check_folder, folder)


def test_quantized_packed_experts_are_refused(tmp_path: Path, sentence: Sentence) -> None:
    quantized = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": []}
    folder, tensors = packed(tmp_path, "qwen3_moe", quantization_config=quantized)
    save(folder, tensors)
    sentence.raises(CheckpointError, check_folder, folder)
