"""vLLM's piecewise compilation, which is CUDA's: exact, with one bank, and with as many artifacts
as there are kinds of layers."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_house, write_mode
from goldens import check_all_against, check_executed
from jobs import engine_job, fresh_prompts, run_named

from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify.oracle import load

pytestmark = pytest.mark.engine

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "block": (write_house, {"layers": 7, "block_size": 4}),
    "full": (write_house, {"layers": 7, "block_size": 1}),
    "cumulative": (write_mode, {"layers": 7, "num_blocks": 3, "cumulative": True}),
    # The fewest layers of which two are of one kind.
    "shallow": (write_house, {"layers": 5, "block_size": 4}),
}
BACKENDS = ("cpp", "torch", "triton")
DEEP = ("block", "full", "cumulative")
EVERY = [*itertools.product(DEEP, BACKENDS, ALGORITHMS)]
CHOSEN = [("shallow", "triton", "single_pass")]  # the backend of CUDA, and the fewest artifacts
# The first piece, the one where queries are folded, the last, and one for each layer of a block.
# By two-phase, a piece after the first block and one before the last have no equal either.
KINDS = {"single_pass": 5, "two_phase": 7}
# Answers of a group may have the sites in front.
BANKS = re.compile(r"= empty_strided\w*\(\(s\d+, \w+, (\w+)\)")


def run(root: Path, rows: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], Any]:
    for name in {model for model, *_ in rows}:
        write, options = MODELS[name]
        write(root / name, **options)
    jobs = {
        "-".join(row): engine_job(
            root / row[0],
            fresh_prompts((5, 34)),
            row[2],
            "piecewise",
            row[1],
            # An interpreter is slow at every token, and the first pass is of a chunk.
            chunk=32,
            answer=2,
            block_size=32,
        )
        for row in rows
    }
    found = run_named(jobs, root / "run", TRITON_INTERPRET="1")
    return {row: (root / row[0], *found["-".join(row)]) for row in rows}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    return run(tmp_path_factory.mktemp("piecewise"), CHOSEN)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return run(tmp_path_factory.mktemp("piecewise"), EVERY)


def check(folder: Path, job: dict[str, Any], result: dict[str, Any]) -> None:
    """Equal to the float64 model, and memory for one bank."""
    check_all_against(load(folder), job, result)
    check_executed(result, job["algorithm"], compiled=True)
    assert result["compiled"]["pieces"] == [MODELS[folder.name][1]["layers"] + 1]
    if job["backend"] != "torch":  # which works on separate tensors
        hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
        made = BANKS.findall("".join(result["compiled"]["code"]))
        assert made.count(str(hidden)) == 1


@pytest.mark.parametrize("row", CHOSEN, ids="-".join)
def test_a_model_in_pieces(chosen, row):
    check(*chosen[row])


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", EVERY, ids="-".join)
def test_every_model_in_pieces(others, row):
    check(*others[row])


def shares(found: dict[tuple[str, str, str], Any], model: str, algorithm: str) -> None:
    _, _, result = found[model, "triton", algorithm]
    assert result["compiled"]["artifacts"] == [KINDS[algorithm]]


def test_layers_of_one_kind_share_an_artifact(chosen):
    """Rows and positions are no constants of a graph, so a deeper model compiles no longer."""
    shares(chosen, "shallow", "single_pass")


@pytest.mark.exhaustive
def test_layers_share_an_artifact_by_two_phase(others):
    shares(others, "block", "two_phase")
