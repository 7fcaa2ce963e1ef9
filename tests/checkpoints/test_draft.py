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


def flags(model: Path, **config: object) -> list[str]:
    return ["--speculative-config", json.dumps({"model": str(model)} | config)]


def check(name: str, target: Checkpoint, words: list[str]) -> None:
    check_draft(name, target, of_server(words))


def demo_with(folder: Path, **changes: object) -> Path:
    return edit(copytree(DEMO, folder), **changes)


def test_a_draft_that_fits(tmp_path):
    check("demo", TARGET, flags(DEMO, method="draft_model"))
    plain = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attn_res": None}
    check("demo", TARGET, flags(demo_with(tmp_path / "plain", **plain)))
    check("demo", TARGET, [])


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
        check("demo", TARGET, flags(demo_with(tmp_path / "draft", **changes)))


def test_another_vocabulary(tmp_path):
    """320 tokens of a house checkpoint, of a golden in FLA's format, and of a plain model."""
    changes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attn_res": None}
    plain = demo_with(tmp_path / "plain", vocab_size=64, **changes)
    house = write_house(tmp_path / "house", "llama", block_size=2)
    for draft in (plain, house, GOLDENS / "fla_transformer_block"):
        with pytest.raises(CheckpointError, match=r"vocabulary of \d+ tokens and the target"):
            check("demo", TARGET, flags(draft))


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
    ("base", "config", "tensor", "message"),
    [
        (
            "glm4_moe",
            {},
            "model.layers.4.mlp_res_norm.weight",
            "mlp_res_norm.* is depth",
        ),
        ("ernie4_5_moe", {}, "model.mtp_block.0.attn_res_proj.weight", "attn_res_proj.* is depth"),
        ("exaone_moe", {"num_nextn_predict_layers": 0}, "", "num_nextn_predict_layers is 0; start"),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, "", "num_nextn_predict_layers is 0; start"),
        ("alice_ai", {"mtp_num_hidden_layers": 0}, "", "mtp_num_hidden_layers is 0; start"),
        ("alice_ai", {}, "mtp.layers.0.mlp_res_norm.weight", "mlp_res_norm.* is depth"),
    ],
)
def test_heads_that_vllm_would_compute_wrongly(base, config, tensor, message, tmp_path):
    result = check_folder(head_of(tmp_path / "model", base, config, tensor))
    with pytest.raises(CheckpointError, match=rf"by 'mtp' needs .*{message}"):
        check("model", result, MTP)
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


def test_a_head_that_reads_the_mix_needs_one(tmp_path):
    parsed = check_folder(head_of(tmp_path / "model", "alice_ai")).translated("model")
    problem = head_problem(replace(parsed, spec=None), None)
    assert problem is not None and "with Attention Residuals alone" in problem


def test_no_heads(tmp_path):
    """A family without one, names that are not the family's, no tensors, another checkpoint's."""
    folder = write_house(
        tmp_path / "none", "glm4_moe", layers=3, block_size=2, changes={FURTHER: 1}
    )
    for model, flags_, message in (
        (DEMO, MTP, "none of Llama is supported"),
        (GOLDENS / "fla_transformer_block", MTP, "none of .* is supported"),
        (folder, MTP, "the checkpoint has none; start without"),
        (
            head_of(tmp_path / "one", "glm4_moe"),
            flags(DEMO, method="mtp"),
            "takes drafts from the head of .*, which is not the served",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            check(str(model), check_folder(model), flags_)


def test_quantised_heads(tmp_path):
    result = check_folder(head_of(tmp_path / "model", "glm4_moe"))
    parsed = result.translated("model")
    config = parsed.config | {"quantization_config": {"quant_method": "fp8"}}
    problem = head_problem(replace(parsed, config=config), result.index)
    assert problem is not None and "quantised weights" in problem
    assert head_problem(parsed, None) is None  # of a model id whose headers cannot be had


def test_drafts_that_vllm_takes_for_heads(tmp_path):
    draft = write_house(tmp_path / "draft", "deepseek_v3", layers=2, block_size=2)
    target = write_house(tmp_path / "target", "llama", block_size=2)
    with pytest.raises(CheckpointError, match=r"DeepSeek-V3, of which vLLM takes every draft for"):
        check(str(target), check_folder(target), flags(draft))


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
def test_every_spelling_of_the_flag(words):
    with pytest.raises(CheckpointError, match="by 'mtp' needs a draft head, and none of Llama"):
        check("demo", TARGET, words)


def test_the_draft_by_a_flag_of_its_own(tmp_path):
    draft = write_house(tmp_path / "draft", block_size=2)
    for words in (["--spec-model", str(draft)], [f"-sc.model={draft}"]):
        with pytest.raises(CheckpointError, match=r"vocabulary of \d+ tokens and the target"):
            check("demo", TARGET, words)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("base", ["glm4_moe", "granite", "kimi_linear"])
def test_families_that_show_no_layers(base, method, tmp_path):
    target = check_folder(write_house(tmp_path / "target", base, block_size=2))
    with pytest.raises(
        CheckpointError, match=f"by '{method}' is not supported for .*class in vLLM"
    ):
        check("target", target, ["--spec-method", method])


def with_head(folder: Path, method: str) -> tuple[Checkpoint, Path]:
    """A model of 64 channels, and a head of it."""
    target = write_house(folder / "target", block_size=2)
    layers = (0, 1, 2) if method == "eagle3" else ()
    return check_folder(target), write_eagle(folder / "head", target, [[7, 8, 9, 7]], layers)


def plain(folder: Path, architecture: str = "LlamaForCausalLM", **changes: object) -> Path:
    changes = {"model_type": "llama", "architectures": [architecture], "attn_res": None} | changes
    return demo_with(folder, **changes)


def without_config(folder: Path) -> Path:
    folder.mkdir()
    return folder


OTHER_MODELS = {  # by what is found
    "is an AttnRes checkpoint; to take": lambda folder: DEMO,
    "is an AttnRes checkpoint; to": lambda folder: GOLDENS / "qwen3_attnres_block",
    "has the architecture MixtralForCausalLM": lambda folder: plain(folder, "MixtralForCausalLM"),
    "architecture Qwen2MoeForCausalLM in": lambda folder: plain(folder, "Qwen2MoeForCausalLM"),
    "names no architecture": lambda folder: demo_with(
        folder, model_type="llama", architectures=None, attn_res=None
    ),
    "has no tensor fc.weight": plain,
    "is one of MedusaModel, for another": lambda folder: plain(folder, "MedusaModel"),
    "has no config.json": without_config,
    "does not exist": lambda folder: folder / "nowhere",
    "is a file": lambda folder: DEMO / "config.json",
}


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("result", OTHER_MODELS)
def test_a_head_that_is_none(result, method, tmp_path):
    """Is refused in one sentence, at once, by what was found."""
    folder = OTHER_MODELS[result](tmp_path / "draft")
    with pytest.raises(CheckpointError, match=result) as refused:
        check("demo", TARGET, flags(folder, method=method))
    assert len(str(refused.value)) < 600 and str(folder) in str(refused.value)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("model", [None, 5, ""])
def test_a_head_that_is_not_named(model, method):
    words = ["--speculative-config", json.dumps({"method": method, "model": model})]
    with pytest.raises(CheckpointError, match="needs the folder of a draft head; give it as"):
        check("demo", TARGET, words)


# Without the method in the name of the test's folder, by which vLLM would choose.
@pytest.mark.parametrize("method", ["eagle", "eagle3"], ids=["one state", "three states"])
def test_a_head(method, tmp_path):
    """That fits; as one of the other kind, which names or channels tell; and as a whole model."""
    target, head = with_head(tmp_path, method)
    check("demo", target, flags(head, method=method))
    other = {"eagle": "eagle3", "eagle3": "eagle"}[method]
    with pytest.raises(CheckpointError, match=r'for which write "method": "eagle3"|192 channels'):
        check("demo", target, flags(head, method=other))
    for words in (flags(head, method="draft_model"), flags(head)):
        with pytest.raises(
            CheckpointError, match=r"is a draft head, (of the|with the).*the method"
        ):
            check("demo", target, words)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        *product(("eagle", "eagle3"), ("hidden_size", "vocab_size")),
        ("eagle3", "target_hidden_size"),
    ],
)
def test_a_head_of_another_size(method, key, tmp_path):
    target, head = with_head(tmp_path, method)
    edit(head, **{key: 96})
    with pytest.raises(CheckpointError, match=f"has {key} 96, and the served model has"):
        check("demo", target, flags(head, method=method))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "medusa", "architectures": None}, "is a draft head, of the arch.* medusa"),
        ({"model_type": "mlp_speculator", "architectures": None}, "of the arch.* mlp_speculator"),
        ({"architectures": ["Glm4MoeMTPModel"]}, "of the architecture Glm4MoeMTPModel"),
        ({"architectures": ["DFlashDraftModel"]}, "of the architecture DFlashDraftModel"),
        ({"speculators_model_type": "eagle3"}, "is a draft head"),
        ({"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM in its config.json, of"),
    ],
)
def test_a_draft_model_that_is_none(config, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        check("demo", TARGET, flags(plain(tmp_path / "draft", **config)))


@pytest.mark.parametrize(
    "method",
    [
        "medusa",
        "mlp_speculator",
        "dflash",
        "dspark",
        "suffix",
        "ngram_gpu",
        "custom_class",
        "eagel",
    ],
)
def test_methods_that_are_refused(method, tmp_path):
    """Before vLLM looks at what they are given."""
    with pytest.raises(SettingError, match=f"by '{method}' is not supported with AttnRes; supp"):
        check("demo", TARGET, flags(tmp_path / "nowhere", method=method))


@pytest.mark.parametrize("name", ["my-eagle-draft", "Eagle3", "dflash", "a-dspark"])
def test_names_by_which_vllm_takes_a_model_for_a_head(name, tmp_path):
    draft = plain(tmp_path / name)
    with pytest.raises(SettingError, match=r"for a head of the method '.*' by its name"):
        check("demo", TARGET, flags(draft, method="draft_model"))
    with pytest.raises((SettingError, CheckpointError), match=r"by its name|draft head, and"):
        check("demo", TARGET, flags(draft))


def test_what_is_left_to_vllm():
    """Methods without a model of their own."""
    check("demo", TARGET, ["--speculative-config", '{"method": "ngram"}'])


@pytest.mark.parametrize(("value", "expected"), [("{", "JSON"), ("[1]", "a JSON object")])
def test_what_is_no_object(value, expected):
    with pytest.raises(SettingError, match=rf"found --speculative-config .*; expected {expected}"):
        check("demo", TARGET, ["--speculative-config", value])
