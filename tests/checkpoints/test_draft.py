"""Draft models are checked by their files, as targets are."""

import json
from copy import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copytree

import pytest
from checkpoints import GOLDENS, edit, write_alice_ai, write_house
from draft_heads import add_head, write_eagle
from serving import DEMO

from attnres_serve.checkpoints.check import describe, render
from attnres_serve.checkpoints.checked import Checkpoint, check_folder
from attnres_serve.checkpoints.draft import check_draft, head_problem
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import Stored
from attnres_serve.compat.arguments import of_server
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES, heads

FURTHER = "num_nextn_predict_layers"
MTP = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]
TARGET = check_folder(DEMO)


def flags(*folder: Path, **config: object) -> list[str]:
    """Settings of speculative decoding, by the folder of a draft or without one."""
    own = {"model": str(folder[0])} if folder else {}
    return ["--speculative-config", json.dumps(own | config)]


def check(name: str, target: Checkpoint, words: list[str]) -> None:
    check_draft(name, target, of_server(words))


def demo_with(folder: Path, **changes: object) -> Path:
    return edit(copytree(DEMO, folder), **changes)


def plain(folder: Path, architecture: str = "LlamaForCausalLM", **changes: object) -> Path:
    changes = {"model_type": "llama", "architectures": [architecture], "attn_res": None} | changes
    return demo_with(folder, **changes)


@pytest.fixture
def refused(sentence):
    """Let words be refused for the demo in the sentence on file."""
    return lambda words, kind=CheckpointError: sentence.raises(kind, check, "demo", TARGET, words)


def test_a_draft_that_fits(tmp_path):
    check("demo", TARGET, flags(DEMO, method="draft_model"))
    check("demo", TARGET, flags(plain(tmp_path / "plain")))
    check("demo", TARGET, [])
    check("demo", TARGET, flags(method="ngram"))  # without a model of its own


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (demo_with, {"num_hidden_layers": 9}),
        (demo_with, {"attn_res": {"block_size": 4, "gate": True}}),
        (demo_with, {"rms_norm_eps": "1e-6"}),
        (plain, {"model_type": "medusa", "architectures": None}),
        (plain, {"model_type": "mlp_speculator", "architectures": None}),
        (plain, {"architectures": ["Glm4MoeMTPModel"]}),
        (plain, {"architectures": ["DFlashDraftModel"]}),
        (plain, {"speculators_model_type": "eagle3"}),
        (plain, {"architectures": ["NobodysForCausalLM"]}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_draft_that_cannot_be_served(write, changes, tmp_path, refused):
    refused(flags(write(tmp_path / "draft", **changes)))


def test_another_vocabulary(tmp_path, refused):
    """320 tokens of a house checkpoint, of a golden in FLA's format, and of a plain model."""
    house = write_house(tmp_path / "house", "llama", block_size=2)
    few = plain(tmp_path / "plain", vocab_size=64)
    for draft in (few, house, GOLDENS / "fla_transformer_block"):
        refused(flags(draft))


def head_of(folder: Path, base: str, config: dict | None = None, name: str = "") -> Path:
    """A checkpoint with a head, further keys of config.json, and a tensor more."""
    write_house(folder, base, layers=4, block_size=2)
    add_head(folder, base, [[7, 8, 9]])
    more = [name] if name else []
    return edit(
        folder,
        lambda t: t.update({one: t["model.norm.weight"].clone() for one in more}),
        **(config or {}),
    )


WITH_HEADS = [name for name, family in FAMILIES.items() if family.draft is not None]


@pytest.mark.parametrize("base", WITH_HEADS)
def test_heads(base, tmp_path):
    """The method by vLLM's name and by its older ones; `check` says how to use the head."""
    folder = head_of(tmp_path / "model", base)
    result = check_folder(folder)
    for method in ("mtp", f"{base}_mtp"):
        check(str(folder), result, ["--speculative-config", json.dumps({"method": method})])
    facts = describe(result)
    assert facts["draft_head"]
    assert """'{"method": "mtp", "num_speculative_tokens": 1}' uses them""" in render(facts)


def test_a_head_of_alice_ais_own_format(tmp_path):
    folder = write_alice_ai(tmp_path / "model", 4, 2)
    add_head(folder, "alice_ai", [[7, 8, 9]])
    assert describe(check_folder(folder))["draft_head"]


@pytest.mark.parametrize(
    ("base", "config", "tensor"),
    [
        ("glm4_moe", {}, "model.layers.4.mlp_res_norm.weight"),
        ("ernie4_5_moe", {}, "model.mtp_block.0.attn_res_proj.weight"),
        ("exaone_moe", {"num_nextn_predict_layers": 0}, ""),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, ""),
        ("alice_ai", {"mtp_num_hidden_layers": 0}, ""),
        ("alice_ai", {}, "mtp.layers.0.mlp_res_norm.weight"),
    ],
    ids=str,
)
def test_heads_that_vllm_would_compute_wrongly(base, config, tensor, tmp_path, sentence):
    result = check_folder(head_of(tmp_path / "model", base, config, tensor))
    sentence.raises(CheckpointError, check, "model", result, MTP)
    facts = describe(result)
    assert not facts["draft_head"]
    assert render(facts).splitlines()[-1].endswith("further tokens")


@pytest.mark.parametrize("base", WITH_HEADS)
def test_every_tensor_of_a_head_is_needed(base, tmp_path):
    """vLLM's loader ends by an exception without one of them, or with another shape."""
    folder = head_of(tmp_path / "model", base)
    result = check_folder(folder)
    parsed, whole = result.translated("model"), result.index
    for name, shape in heads.shapes(FAMILIES[base], parsed.config).items():
        rest = {key: stored for key, stored in whole.stored.items() if key != name}
        problem = head_problem(parsed, replaced(whole, rest))
        assert problem is not None and f"needs the tensor {name}, which is missing" in problem
        wide = replace(whole.stored[name], shape=(*shape, 1))
        problem = head_problem(parsed, replaced(whole, rest | {name: wide}))
        assert problem is not None and f"needs the tensor {name} as {list(shape)}" in problem


def replaced(index: TensorIndex, stored: dict[str, Stored]) -> TensorIndex:
    """An index of other tensors."""
    other = copy(index)
    other.stored = stored
    return other


def test_a_head_that_reads_the_mix_needs_one(tmp_path, sentence):
    parsed = check_folder(head_of(tmp_path / "model", "alice_ai")).translated("model")
    problem = head_problem(replace(parsed, spec=None), None)
    sentence.check(problem)


def test_no_heads(tmp_path, sentence):
    """A family without one, names that are not the family's, no tensors, another checkpoint's."""
    folder = write_house(
        tmp_path / "none", "glm4_moe", layers=3, block_size=2, changes={FURTHER: 1}
    )
    one = head_of(tmp_path / "one", "glm4_moe")
    cases = [(path, MTP) for path in (DEMO, GOLDENS / "fla_transformer_block", folder)]
    for model, words in (*cases, (one, flags(DEMO, method="mtp"))):
        sentence.raises(CheckpointError, check, str(model), check_folder(model), words)


def test_quantised_heads(tmp_path, sentence):
    result = check_folder(head_of(tmp_path / "model", "glm4_moe"))
    parsed = result.translated("model")
    config = parsed.config | {"quantization_config": {"quant_method": "fp8"}}
    problem = head_problem(replace(parsed, config=config), result.index)
    sentence.check(problem)
    assert head_problem(parsed, None) is None  # of a model id whose headers cannot be had


def test_drafts_that_vllm_takes_for_heads(tmp_path, sentence):
    draft = write_house(tmp_path / "draft", "deepseek_v3", layers=2, block_size=2)
    target = write_house(tmp_path / "target", "llama", block_size=2)
    sentence.raises(CheckpointError, check, str(target), check_folder(target), flags(draft))


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "mtp"}'],
        ['--speculative_config={"method": "mtp"}'],
        ["-sc", '{"method": "mtp"}'],
        ['-sc={"method": "mtp"}'],
        ["--speculative-config.method", "mtp"],
        ["--speculative-config.num_speculative_tokens", "1", "-sc.method=mtp"],
        ["--spec-method", "mtp", "--spec-tokens", "1"],
        ["--spec-method=mtp", "--speculative-config", '{"num-speculative-tokens": 1}'],
        ["--speculative-config", '{"method": "ngram"}', "-sc", '{"method": "mtp"}'],
    ],
)
def test_every_spelling_of_the_flag(words, refused):
    refused(words)


def test_the_draft_by_a_flag_of_its_own(tmp_path, refused):
    draft = write_house(tmp_path / "draft", block_size=2)
    for words in (["--spec-model", str(draft)], [f"-sc.model={draft}"]):
        refused(words)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("base", ["glm4_moe", "granite", "kimi_linear"])
def test_families_that_show_no_layers(base, method, tmp_path, sentence):
    target = check_folder(write_house(tmp_path / "target", base, block_size=2))
    sentence.raises(CheckpointError, check, "target", target, ["--spec-method", method])


def with_head(folder: Path, method: str) -> tuple[Checkpoint, Path]:
    """A model of 64 channels, and a head of it."""
    target = write_house(folder / "target", block_size=2)
    layers = (0, 1, 2) if method == "eagle3" else ()
    return check_folder(target), write_eagle(folder / "head", target, [[7, 8, 9, 7]], layers)


def without_config(folder: Path) -> Path:
    folder.mkdir()
    return folder


OTHER_MODELS = {
    "the demo": lambda folder: DEMO,
    "Qwen3 with AttnRes": lambda folder: GOLDENS / "qwen3_attnres_block",
    "a Mixtral": lambda folder: plain(folder, "MixtralForCausalLM"),
    "a Qwen2Moe": lambda folder: plain(folder, "Qwen2MoeForCausalLM"),
    "no architecture": lambda folder: plain(folder, architectures=None),
    "a Llama": plain,
    "a Medusa": lambda folder: plain(folder, "MedusaModel"),
    "no config.json": without_config,
    "nothing": lambda folder: folder / "nowhere",
    "a file": lambda folder: DEMO / "config.json",
}


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_a_head_that_is_none(model, method, tmp_path, refused):
    """Is refused in one sentence, at once, by what was found."""
    refused(flags(OTHER_MODELS[model](tmp_path / "draft"), method=method))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("model", [None, 5, ""])
def test_a_head_that_is_not_named(model, method, refused):
    refused(flags(method=method, model=model))


# Without the method in the name of the test's folder, by which vLLM would choose.
@pytest.mark.parametrize("method", ["eagle", "eagle3"], ids=["one state", "three states"])
def test_a_head(method, tmp_path, sentence):
    """That fits; as one of the other kind, which names or channels tell; and as a whole model."""
    target, head = with_head(tmp_path, method)
    check("demo", target, flags(head, method=method))
    other = {"eagle": "eagle3", "eagle3": "eagle"}[method]
    sentence.raises(CheckpointError, check, "demo", target, flags(head, method=other))
    for words in (flags(head, method="draft_model"), flags(head)):
        sentence.raises(CheckpointError, check, "demo", target, words)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        *product(("eagle", "eagle3"), ("hidden_size", "vocab_size")),
        ("eagle3", "target_hidden_size"),
    ],
)
def test_a_head_of_another_size(method, key, tmp_path, sentence):
    target, head = with_head(tmp_path, method)
    edit(head, **{key: 96})
    sentence.raises(CheckpointError, check, "demo", target, flags(head, method=method))


@pytest.mark.parametrize(
    "method",
    [
        *("medusa", "mlp_speculator", "dflash", "dspark"),
        *("suffix", "ngram_gpu", "custom_class", "eagel"),
    ],
)
def test_methods_that_are_refused(method, refused):
    """Before vLLM looks at what they are given."""
    refused(flags(Path("nowhere"), method=method), SettingError)


@pytest.mark.parametrize("value", ["{", "[1]"])
def test_what_is_no_object(value, refused):
    refused(["--speculative-config", value], SettingError)


@pytest.mark.parametrize("name", ["my-eagle-draft", "Eagle3", "dflash", "a-dspark"])
def test_names_by_which_vllm_takes_a_model_for_a_head(name, tmp_path, refused):
    draft = plain(tmp_path / name)
    refused(flags(draft, method="draft_model"), SettingError)
    refused(flags(draft), (SettingError, CheckpointError))
