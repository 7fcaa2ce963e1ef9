"""Every served format stands in the tables that are kept by hand."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_kimi_names, write_titan
from safetensors import safe_open
from serving import FAMILY_GOLDENS, GOLDENS

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.formats import SERVED, by_name

# Of formats without a golden.
WRITERS: dict[str, Callable[[Path], Any]] = {
    "qwen3_ar": lambda folder: write_kimi_names(folder, block_layers=2),
    "torchtitan": write_titan,
}
NAMES = sorted(SERVED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of every format."""
    root = tmp_path_factory.mktemp("formats")
    for name, write in WRITERS.items():
        write(root / name)
    return [folder for place in (GOLDENS, FAMILY_GOLDENS, root) for folder in place.iterdir()]


def renamed(folder: Path, format_name: str) -> Iterator[str]:
    """Matrices inside of layers, without queries, whose names are not the family's."""
    with safe_open(folder / "model.safetensors", "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - safe_open is not a mapping
            ours = by_name(format_name).rename(name)
            is_linear = ".layers." in ours and "_res_" not in ours
            if is_linear and ours != name and len(stored.get_slice(name).get_shape()) == 2:
                yield name


def test_adapters_are_refused_where_linear_layers_have_other_names(folders: list[Path]) -> None:
    formats = {folder: check_folder(folder).translated(folder.name).format for folder in folders}
    assert sorted(set(formats.values())) == NAMES
    odd = {name for folder, name in formats.items() if any(renamed(folder, name))}
    assert odd == {name for name, one in SERVED.items() if one.layer_names_of}


def test_names_lead_back(folders: list[Path]) -> None:
    """By the house name of what a tensor holds, every format finds the tensor."""
    for folder in folders:
        module = by_name(check_folder(folder).translated(folder.name).format)
        with safe_open(folder / "model.safetensors", "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safe_open is not a mapping
                for part in module.fused_parts(name):
                    assert module.stored_name(module.rename(part)) == name


def test_every_golden_has_the_fields_of_an_answer() -> None:
    """As docs/build/add-a-format.md states them."""
    for path in (*GOLDENS.glob("*/expected.json"), *FAMILY_GOLDENS.glob("*/expected.json")):
        for case in json.loads(path.read_text()):
            answers = ("output", "output_logprobs", "output_gap")
            assert set(case) == {"prompt", "prompt_logprobs", *answers}
            assert len(case["prompt"]) == len(case["prompt_logprobs"])
            assert case["prompt_logprobs"][0] is None
            assert len({len(case[name]) for name in answers}) == 1
