"""Other readings of config.json: which there are, and what texts say of them.

A model predicts what it wrote itself better than other models do. So a text that random weights
wrote under one reading is to them what a held-out text is to trained weights.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    edit,
    write_fla,
    write_house,
    write_kimi_names,
    write_mode,
    write_nanogpt,
    write_titan,
)
from checkpoints.kimi import write_with_more
from facts import TINY
from serving import DEMO, FAMILY_GOLDENS, GOLDENS

from attnres_serve import families
from attnres_serve.checkpoints import tokenizer
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.verify import command, compare, evidence, oracle, texts
from attnres_serve.verify.evidence import Evidence
from attnres_serve.verify.oracle import starts_of
from attnres_serve.verify.readings import Reading, readings

LAYERS, SIZE = 6, 4  # so that sublayers (4), layers (2) and blocks (3) are three numbers
SUBLAYERS = 2 * LAYERS
RIGHT = starts_of(SIZE, SUBLAYERS)

WRONG: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    f"{name} {values}": (write, values, said)
    for name, write, said, every in (
        (
            "house",
            lambda folder: write_house(folder, "qwen3", layers=LAYERS, block_size=SIZE),
            "block_size 4",
            [{"attn_res": {"block_size": size}} for size in (2, 3, 8)]
            + [
                {"attn_res": {"block_starts": starts}} for starts in ([0, 2, 4], [*range(0, 12, 2)])
            ],
        ),
        (
            "qwen3_ar",
            lambda folder: write_kimi_names(folder, layers=LAYERS, block_layers=2),
            "attn_res_block_size 2",
            [{"attn_res_block_size": layers} for layers in (1, 3, 4)],
        ),
        (
            "delta_attnres",
            lambda folder: write_mode(folder, layers=LAYERS, num_blocks=3),
            "attnres_num_blocks 3",
            [{"attnres_num_blocks": blocks} for blocks in (2, 6)],
        ),
        (
            "torchtitan",
            lambda folder: write_titan(folder, layers=LAYERS, num_blocks=3),
            "attn_res_num_blocks 3",
            [{"attn_res_num_blocks": blocks} for blocks in (2, 4, 6)],
        ),
    )
    for values in every
}


def written(model: oracle.Model, tokens: int = evidence.FEWEST, count: int = 2) -> list[list[int]]:
    """Texts drawn from a model."""
    generator, found = torch.Generator().manual_seed(0), []
    for first in range(3, 3 + count):
        ids = [first]
        while len(ids) < tokens:
            chances = model.logprobs(ids)[-1].exp()
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        found.append(ids)
    return found


def model_of(folder: Path) -> compare.Reference:
    return compare.reference(folder, check_folder(folder).translated(str(folder)))


def measured(folder: Path, ids: list[list[int]]) -> Evidence:
    return evidence.measure(model_of(folder), readings(check_folder(folder)), ids)


@pytest.fixture(scope="module")
def own_text(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the weights of the Qwen3 of every format wrote; makers share them by their seed."""
    folder = tmp_path_factory.mktemp("right")
    return written(oracle.load(write_house(folder, "qwen3", layers=LAYERS, block_size=SIZE)))


@pytest.mark.parametrize("case", WRONG)
def test_a_number_of_another_unit_is_warned_about(case: str, own_text, tmp_path: Path) -> None:
    write, values, said = WRONG[case]
    folder = write(tmp_path)
    right = measured(folder, own_text)
    assert right.is_told and right.warning is None and right.reading == said and not right.alike
    wrong = measured(edit(folder, **values), own_text)
    assert wrong.warning and wrong.warning.startswith(f"with {said} the loss is {right.loss:.2f}, ")
    assert f"it is {wrong.loss:.2f}: " in wrong.warning
    assert min(wrong.others, key=wrong.others.__getitem__) == said


def test_fla(tmp_path: Path) -> None:
    """Of its own classes and names."""
    folder = write_fla(tmp_path, layers=4, block_size=4)
    ids = written(oracle.load(folder))
    for size in (2, 8):
        found = measured(edit(folder, attnres_block_size=size), ids)
        assert found.warning and "with attnres_block_size 4 the loss" in found.warning
        assert f"config.json's {size} it is" in found.warning


def test_a_final_mix_that_was_not_trained(tmp_path: Path) -> None:
    folder = write_house(tmp_path, layers=2, block_size=2)
    model = oracle.load(folder)
    ids = written(model.with_spec(replace(model.spec, final_mix=False)))
    found = measured(folder, ids)
    assert found.warning and found.warning.startswith("with no final mix the loss is ")
    assert "config.json's final mix it is" in found.warning


# --- with trained weights


@dataclass
class Remembering:
    """A model that evaluates no reading of a text twice."""

    model: Any
    known: dict = field(default_factory=dict)

    @property
    def spec(self):
        return self.model.spec

    def with_spec(self, spec):
        return Remembering(self.model.with_spec(spec), self.known)

    def logprobs(self, ids):
        key = self.spec.block_starts, self.spec.final_mix, tuple(ids)
        if key not in self.known:
            self.known[key] = self.model.logprobs(ids)
        return self.known[key]


@pytest.fixture(scope="module")
def demo() -> Callable[[Path], Evidence]:
    """What our texts say of a folder that has the demo's weights."""
    model, tokenize = Remembering(oracle.load(DEMO)), tokenizer.load(DEMO)
    (ids,) = texts.pieces(texts.CODE, texts.USUAL, texts.USUAL, tokenize)[:1]
    return lambda folder: evidence.measure(
        model.with_spec(model_of(folder).spec), readings(check_folder(folder)), [ids]
    )


@pytest.mark.parametrize(("size", "said"), [(4, None), (2, "block_size 4"), (8, "block_size 4")])
def test_the_demo(size: int, said: str | None, demo: Callable, tmp_path: Path) -> None:
    """With other formats' names and numbers readings are the same: of drawn weights, above."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    found = demo(edit(folder, attn_res={"block_size": size}))
    assert found.is_told
    assert (found.warning or "").startswith(f"with {said} the loss is " if said else "")
    assert said or (found.warning is None and not found.alike)


# --- when nothing can be told

EVERY_GOLDEN = [*sorted(GOLDENS.iterdir()), *sorted(FAMILY_GOLDENS.iterdir())]


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(
            one, marks=[pytest.mark.families] * (one.parent == FAMILY_GOLDENS), id=one.name
        )
        for one in EVERY_GOLDEN
    ],
)
def test_goldens_are_untrained(golden: Path) -> None:
    ids = texts.pieces(None, 129, evidence.FEWEST, tokenizer.load(golden))
    assert len(ids) == 2
    found = measured(golden, ids)
    assert not found.is_told and found.warning is None and found.others
    report = compare.Report(64, 0.0, 0.0, 0.0, 1.0, "the head", 0.0, {}, True)
    lines = command.table(report, measured=found).splitlines()
    assert "cannot tell whether config.json is right" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80


FAST = ("llama", "qwen3_moe", "mamba2")
BY_CLASS = [name for name in TINY if families.FAMILIES[name].has_hf_class]


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.exhaustive) for n in BY_CLASS]
)
def test_untrained_families(name: str, tmp_path: Path) -> None:
    folder = write_house(tmp_path, name, layers=4, block_size=2, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (2, evidence.FEWEST), generator=generator).tolist()
    found = measured(folder, ids)
    assert not found.is_told and found.warning is None and found.others


def test_readings_that_are_one_model(tmp_path: Path) -> None:
    """With zero queries every mix is a mean, whatever the blocks."""
    folder = write_house(tmp_path, layers=3, block_size=2, zero_queries=True)
    found = measured(folder, written(oracle.load(folder)))
    assert found.is_told and found.warning is None
    assert {"block_size 4", "block_size 1"} <= {*found.alike}


def test_a_warning_is_as_rare_as_it_should_be() -> None:
    """Of equally good readings, whose tokens have their luck in common with their neighbours."""
    generator = torch.Generator().manual_seed(0)
    trials, risk = 500, 0.05
    noise = torch.randn(trials, 128 + 2, generator=generator).double()
    tokens = (noise[:, 2:] + noise[:, 1:-1] + noise[:, :-2]) / 3
    false = sum(evidence._interval([one], risk)[0] > 0 for one in tokens)
    assert 0 < false < trials * 2 * risk  # twice, as chunks' neighbours share some luck too


def test_a_gain_of_less_than_the_least_is_none() -> None:
    same = torch.full((128,), evidence.LEAST / 2, dtype=torch.float64)
    low, high = evidence._interval([same], 1e-4)
    assert low == pytest.approx(high) and not low > evidence.LEAST


# --- which readings there are


def of(folder: Path) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(one.name, one.starts, one.final_mix) for one in readings(check_folder(folder))]


def by_name(folder: Path) -> dict[str, Reading]:
    return {one.name: one for one in readings(check_folder(folder))}


def test_all_readings_of_a_size_in_sublayers(tmp_path: Path) -> None:
    assert of(write_house(tmp_path, layers=5, block_size=2)) == [
        ("block_size 2", (0, 2, 4, 6, 8), True),
        ("block_size 4", (0, 4, 8), True),
        ("block_size 6", (0, 6), True),  # two blocks of layers
        ("block_size 5", (0, 5), True),  # two blocks of sublayers
        ("block_size 1", tuple(range(10)), True),
        ("no final mix", (0, 2, 4, 6, 8), False),
    ]


def test_a_format_that_allows_no_such_number(tmp_path: Path) -> None:
    """The reading has a name in words."""
    found = of(write_fla(tmp_path, layers=5, block_size=2))
    assert ("blocks of 5 sublayers", (0, 5), True) in found
    assert ("attnres_block_size 4", (0, 4, 8), True) in found


def test_a_number_of_blocks_is_rounded_either_way(tmp_path: Path) -> None:
    up = by_name(write_mode(tmp_path / "up", layers=5, num_blocks=3))
    assert up["attnres_num_blocks 5"].starts == (0, 2, 4, 6, 8)
    assert up["attnres_num_blocks 5"].question == "are the layers of a block rounded down?"
    down = by_name(write_titan(tmp_path / "down", layers=5, num_blocks=3))
    assert down["attn_res_num_blocks 2"].starts == (0, 4, 8)
    assert down["attn_res_num_blocks 2"].question == "are the layers of a block rounded up?"


def test_a_mode_without_a_number(tmp_path: Path) -> None:
    names = by_name(write_mode(tmp_path, layers=3, mode="full"))
    assert [*names][:2] == ["blocks of 1 sublayers", "blocks of 2 sublayers"]


def test_shared_queries_say_where_blocks_begin(tmp_path: Path) -> None:
    folder = write_house(tmp_path, block_size=2, attn_res={"shared_queries": "block"})
    assert [*by_name(folder)] == ["block_size 2", "no final mix"]


def test_no_final_mix_is_added(tmp_path: Path) -> None:
    """Its tensors would be left over, which is refused before."""
    found = readings(check_folder(write_house(tmp_path, block_size=2, final_mix=False)))
    assert not any(one.final_mix for one in found)


def test_a_key_inside_of_another_model(tmp_path: Path) -> None:
    """Kimi K3 states its language model within an object."""
    own = write_with_more(tmp_path / "whole", FAMILY_GOLDENS / "kimi_linear")
    whole, inner = by_name(own), by_name(FAMILY_GOLDENS / "kimi_linear")
    assert [*whole] == [*inner] and next(iter(whole)).startswith("attn_res_block_size ")


def test_every_format_states_its_blocks(tmp_path: Path) -> None:
    """By the key and in the unit that it says: the served reading is found among all values."""
    folders = [write_kimi_names(tmp_path / "ar", block_layers=2), write_titan(tmp_path / "titan")]
    folders += [write_nanogpt(tmp_path / "nano"), *EVERY_GOLDEN]
    for folder in folders:
        checkpoint = check_folder(folder)
        own, *_ = readings(checkpoint)
        assert own.starts == checkpoint.parsed.spec.block_starts
        if own.stated.isdigit():
            assert own.name.endswith(f" {own.stated}") and own.name.split()[0] in {
                *checkpoint.config,
                *checkpoint.config.get("text_config", {}),
                *checkpoint.config.get("attn_res", {}),
            }


# --- what a person reads


def said(**changes: Any) -> str:
    report = compare.Report(64, 0.0, 0.0, 0.0, 1.0, "the head", 0.0, {}, True)
    found = replace(Evidence("block_size 2", 511, 2.5, 4.0, {"block_size 4": 2.2}), **changes)
    lines = command.table(report, measured=found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "it is served as config.json describes (eager, float32, one process)"
    return " ".join(" ".join(lines).split())


def test_the_report() -> None:
    """It warns, tells nothing apart, or finds the others worse; it claims no more."""
    warning = "with block_size 4 the loss is 2.20, with config.json's 2 it is 2.50: is it?"
    assert f"WARNING {warning}" in said(is_told=True, warning=warning)
    assert "cannot tell config.json's from block_size 4" in said(
        is_told=True, alike=["block_size 4"]
    )
    assert "every other is worse by more than the texts' noise" in said(is_told=True)
    assert "cannot tell whether config.json is right" in said()
    alone = said(is_told=True, others={})
    assert "nothing else fits the tensors" in alone and "every other" not in alone


# --- texts


def test_texts() -> None:
    """Ours are long enough for any tokenizer; a user's is cut in two, and a short one is none."""
    tokenize = tokenizer.load(DEMO)
    assert [len(ids) for ids in texts.pieces(None, 512, 65, tokenize)] == [512, 512]
    assert [len(ids) for ids in texts.pieces(None, 0, 65, tokenize)] == []
    first, second = texts.pieces(texts.PROSE, 100, 65, tokenize)
    assert len(first) == len(second) == 100 and first != second
    assert texts.pieces("a few words", 512, 65, tokenize) == []


def test_large_models_get_fewer_tokens() -> None:
    assert [texts.usual(n) for n in (10**6, 10**8, 2 * 10**8, 10**12)] == [512, 512, 256, 128]
