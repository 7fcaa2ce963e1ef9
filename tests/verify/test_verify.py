"""``attnres-serve verify``: holds on goldens, fails on every damage and says where it is."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import (
    config_of,
    edit,
    write_baseline,
    write_fla,
    write_house,
    write_kimi_names,
    write_mode,
    write_nanogpt,
    write_standard,
    write_titan,
)
from goldens import expected
from jobs import run_verify, verify_job
from refusals import refused
from safetensors.torch import load_file
from serving import DEMO, GOLDENS, run_module

from attnres_serve import cli
from attnres_serve.checkpoints import checked
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.compat import engines
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.verify import command as verify
from attnres_serve.verify import compare, oracle
from attnres_serve.verify import passages as passage_texts

BLOCK = "fla_transformer_block"
CUMULATIVE = "qwen3_attnres_cumulative_block"
DELTA = "qwen3_attnres_block"


def translated(folder: Path) -> ParsedConfig:
    return checked.check_folder(folder).translated("it")


def damaged(golden: str, folder: Path, change) -> Path:
    """A copy whose tensors were edited."""
    return edit(shutil.copytree(GOLDENS / golden, folder), change)


def perturb_a_query(tensors: dict) -> None:
    tensors["model.layers.1.mlp_res_proj.weight"][0, 7] += 0.25


def scale_a_matrix(tensors: dict) -> None:
    tensors["model.layers.3.attn.o_proj.weight"] *= 1.01


def raise_a_bias(tensors: dict) -> None:
    tensors["model.layers.4.attn_res_bias"] += 0.25


def moved_boundary(folder: Path) -> Path:
    """The house copy of a golden whose second block begins a sublayer later."""
    convert(str(GOLDENS / BLOCK), str(folder), to_house=True)
    config = config_of(folder)
    assert config["attn_res"]["block_size"] == 4 and config["num_hidden_layers"] == 5
    del config["attn_res"]["block_size"]
    return edit(folder, attn_res=config["attn_res"] | {"block_starts": [0, 5, 8]})


KINDS = ("attention", "MLP")
WINDOW = 70  # more than the usual passage
UP = "model.layers.0.mlp.up_proj.weight"


def without_its_window(folder: Path) -> tuple[Path, Path]:
    """A checkpoint that lost its sliding window, and the one it was."""
    return write_house(folder / "wrong", block_size=2), windowed(folder / "right", WINDOW)


ALL = pytest.mark.exhaustive  # another row of the same kind


def report_of(
    served: Path, reference: Path, prompts: list[list[int]], folder: Path, **chosen: str
) -> dict:
    (report,) = run_verify([verify_job(served, reference, prompts, **chosen)], folder / "run")
    return report


def prompts_of(golden: str) -> list[list[int]]:
    return [case["prompt"] for case in expected(GOLDENS / golden)[1:3]]


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", [pytest.param(BLOCK, marks=ALL), CUMULATIVE, pytest.param("nanogpt_block", marks=ALL)]
)
def test_a_golden_holds(name, tmp_path):
    golden, prompts = GOLDENS / name, prompts_of(name)
    report = report_of(golden, golden, prompts, tmp_path, attnres_algorithm="single_pass")
    assert report["holds"] and not report["parts"] and report["greedy_agreement"] == 1
    assert report["tokens"] == sum(map(len, prompts))
    # A tenth of the bounds, so that these are not what hides a fault; KL goes with the square, and
    # a mean of it lies further below the largest.
    assert 0 < report["worst_error"] < compare.PART_BOUND / 10
    assert 0 < report["logprob_gap"] < compare.LOGPROB_BOUND / 10
    assert 0 <= report["kl"] < compare.KL_BOUND / 1000


@pytest.mark.engine
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # test_the_command has a query
        (scale_a_matrix, ["the attention of layer 3"]),
        pytest.param(raise_a_bias, ["the site of the attention of layer 4"], marks=ALL),
        (
            moved_boundary,
            # Up to site 5 both have the same sources; nothing but sites is wrong after it.
            [
                "the site of the MLP of layer 2",
                *(
                    f"the site of the {kind} of layer {layer}"
                    for layer in (3, 4)
                    for kind in ("attention", "MLP")
                ),
                "the site of the final norm",
            ],
        ),
    ],
)
def test_damage_is_named(change, parts, tmp_path):
    golden, served = CUMULATIVE if change is raise_a_bias else BLOCK, tmp_path / "damaged"
    moved_boundary(served) if change is moved_boundary else damaged(golden, served, change)
    ask = served, GOLDENS / golden, prompts_of(golden), tmp_path
    report = report_of(*ask, attnres_algorithm="two_phase")
    assert not report["holds"]
    assert list(report["parts"]) == parts
    assert report["worst_part"] in parts and report["worst_error"] > 1e-3


BASELINE = "baseline_attnres"


def house_copy(folder: Path, change=None, **attn_res) -> Path:
    """The baseline's golden in the house format with another tensor or other depth attention."""
    convert(str(GOLDENS / BASELINE), str(folder), to_house=True)
    return edit(folder, change, attn_res=config_of(folder)["attn_res"] | attn_res)


def no_final_bias(tensors: dict) -> None:
    tensors["model.output_attn_res_bias"] *= 0


@pytest.mark.engine
def test_faults_of_a_cumulative_model_with_rotated_keys(tmp_path):
    """The golden holds, and so does its house copy; every fault is named, and nothing else."""
    final = "the site of the final norm"
    behind_layer_1 = [f"the site of the {kind} of layer {n}" for n in (2, 3) for kind in KINDS]
    attention = [f"the attention of layer {layer}" for layer in range(4)]
    rows = {
        "nothing": (GOLDENS / BASELINE, None, []),
        "nothing of the house copy": (house_copy(tmp_path / "copy"), None, []),
        "no bias at the final site": (house_copy(tmp_path / "bias", no_final_bias), None, [final]),
        "one of two equal sources dropped": (
            house_copy(tmp_path / "dropped", block_starts=[0, 4]), None, [final],
        ),
        "a copy before the MLP": (
            house_copy(tmp_path / "early", block_starts=[0, 3, 7]),
            None,
            ["the site of the MLP of layer 1", *behind_layer_1, final],
        ),
        "keys normed before they are rotated": (  # the last one, as it stays
            GOLDENS / BASELINE, "keys_normed_before_they_are_rotated", attention,
        ),
    }  # fmt: skip
    ask = GOLDENS / BASELINE, prompts_of(BASELINE)
    jobs = [verify_job(folder, *ask) | {"fault": fault} for folder, fault, _ in rows.values()]
    reports = run_verify(jobs, tmp_path / "run")
    for (name, (*_, parts)), report in zip(rows.items(), reports, strict=True):
        assert report["holds"] == (not parts), name
        assert list(report["parts"]) == parts, name


@pytest.mark.engine
@pytest.mark.parametrize("all_tokens", [pytest.param(False, marks=ALL), True])
def test_the_sample_reaches_the_window(all_tokens, tmp_path):
    """A fault that 64 tokens cannot show, and the sample can."""
    wrong, right = without_its_window(tmp_path)
    models = [translated(one) for one in (wrong, right)]
    tokens = 64
    if all_tokens:
        limits = passage_texts.limits(*models)
        tokens = passage_texts.tokens(models[0], limits, None, "it")
    prompt = [(7 * i * i + 3 * i + 5) % 320 for i in range(tokens)]
    report = report_of(wrong, right, [prompt], tmp_path)
    assert report["holds"] is not all_tokens
    assert ("the attention of layer 0" in report["parts"]) is all_tokens


@pytest.mark.engine
@pytest.mark.versions
def test_the_command(tmp_path):
    """A report a person can read, an exit status, and one JSON object on request."""
    folder = damaged(BLOCK, tmp_path / "damaged", perturb_a_query)
    words = ("attnres_serve", "verify", str(folder), "--tokens", "20", "--reference")
    said = run_module(*words, str(GOLDENS / BLOCK), timeout=300, status=1)
    assert "the site of the MLP of layer 1" in said and "DOES NOT HOLD" in said
    assert "which is right      cannot tell whether config.json is right" in said


# --- what is refused


def test_refusals(capsys, tmp_path):
    golden = str(GOLDENS / BLOCK)
    assert "does not exist" in refused(capsys, "verify", str(tmp_path / "none"))
    assert "--tokens is 1" in refused(capsys, "verify", golden, "--tokens", "1")
    for few in ("64", "-1"):
        assert f"--readings is {few}" in refused(capsys, "verify", golden, "--readings", few)
    assert "cannot be read" in refused(capsys, "verify", golden, "--text", str(tmp_path / "none"))
    short = tmp_path / "short"
    short.write_text("Four words of text.")
    assert "a longer one" in refused(capsys, "verify", golden, "--text", str(short))
    short.write_bytes("Four words of text.".encode("utf-16"))
    assert "is not in UTF-8" in refused(capsys, "verify", golden, "--text", str(short))
    short.write_bytes("Four words of text.".encode("utf-16-le"))
    assert "has NUL characters" in refused(capsys, "verify", golden, "--text", str(short))
    bare = shutil.copytree(golden, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "tokenizer" in refused(capsys, "verify", str(bare))
    for tokens in ("256", "300"):
        line = refused(capsys, "verify", golden, "--tokens", tokens)
        assert "has a context of 256" in line and "give at most 255" in line


@pytest.mark.parametrize("option", [{"layers": 2}, {"vocab": 384}, {"hidden": 128}], ids=str)
def test_a_reference_of_other_sizes(option: dict, tmp_path: Path, capsys) -> None:
    served = write_house(tmp_path / "served", block_size=2)
    other = write_house(tmp_path / "other", block_size=2, **option)
    line = refused(capsys, "verify", str(served), "--reference", str(other))
    assert "which is another model; give the checkpoint that it was converted from" in line


@pytest.mark.parametrize("name", [BLOCK, CUMULATIVE, "nanogpt_block"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named(name, value, capsys, tmp_path):
    """Of the checkpoint or of its reference, before an engine is started."""
    names = sorted(load_file(GOLDENS / name / "model.safetensors"))
    wrong = names[len(names) // 2]
    folder = damaged(name, tmp_path / "m", lambda t: t[wrong].view(-1)[0].fill_(value))
    for words in ([folder], [GOLDENS / name, "--reference", folder]):
        assert f"the tensor {wrong} holds {value}" in refused(capsys, "verify", *map(str, words))


def test_a_refusal_of_vllm_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an engine is started; pydantic's first line would say nothing.

    The variables of this process stay as they are.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with (
        pytest.raises(SettingError, match=r"^User-specified max_model_len \(301\)"),
        engines.recorded_engine(str(GOLDENS / BLOCK), 300, {}, "float32"),
    ):
        pass
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_nothing_to_verify(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    folder = write_standard(tmp_path)
    assert cli.main(["verify", str(folder)]) != 0
    assert f"{folder} is not an AttnRes checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tensors": lambda t: t.update({f"{UP}_scale": torch.ones(96, 1)})},
            r"cannot be evaluated in float64 \(.*weight_scale",
        ),
        # Quantised weights are served, but there is nothing to compare them with.
        (
            {"quantization_config": {"quant_method": "x"}},
            "is quantised, and quantised weights are not supp",
        ),
    ],
    ids=["a tensor", "quantised"],
)
def test_what_the_float64_model_does_not_know(changes: dict, said: str, tmp_path: Path) -> None:
    folder = write_house(tmp_path, block_size=2)
    parsed = translated(folder)
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=said):
        compare.reference(folder, parsed)


@pytest.mark.parametrize(
    "write",
    [
        *(partial(write_house, base=base, block_size=2) for base in ("llama", "qwen2", "qwen3")),
        partial(write_kimi_names, block_layers=1),
        *(write_baseline, write_fla, write_mode, write_nanogpt, write_titan),
    ],
)
def test_keys_that_serving_does_without(write: Callable, tmp_path: Path) -> None:
    """The float64 model does without them too, and has the same value in their place."""
    folder = write(tmp_path)
    config = config_of(folder)
    for key in config:
        edit(folder, **config | {key: ...})
        try:
            parsed = checked.check_folder(folder).parsed
        except CheckpointError:
            continue
        if parsed is not None and parsed.spec is not None:
            spec = oracle.load(folder).spec
            assert spec.eps == parsed.config.get("rms_norm_eps", 1e-6), key
            assert spec.key_norm_eps == parsed.spec.key_norm_eps, key


# --- how far the sample reaches


def windowed(folder: Path, window: int, **options: int) -> Path:
    """A checkpoint with a sliding window in every layer."""
    written = write_house(folder, block_size=2, **options)
    return edit(written, sliding_window=window, layer_types=["sliding_attention"] * 3)


@pytest.mark.parametrize(
    ("window", "context", "asked", "tokens", "said"),
    [
        (16, 512, None, 64, None),
        (64, 512, None, 96, None),
        (64, 512, 65, 65, None),
        (64, 512, 64, 64, "positions 0 to 63; the window of 64 was not reached"),
        (300, 320, None, 319, None),
        (400, 320, None, 319, "positions 0 to 318; the window of 400 was not reached"),
        (5000, 9000, None, 64, "positions 0 to 63; the window of 5000 was not reached"),
    ],
)
def test_windows(
    window: int, context: int, asked: int | None, tokens: int, said: str | None, tmp_path: Path
) -> None:
    """Passed by the sample where that is cheap; else the report says that they were not."""
    parsed = translated(windowed(tmp_path, window, max_positions=context))
    limits = passage_texts.limits(parsed)
    assert limits == {"the window": window}
    assert passage_texts.tokens(parsed, limits, asked, "it") == tokens
    assert passage_texts.unreached(limits, tokens) == said


@pytest.mark.parametrize(
    ("base", "limits"),
    [
        ("gemma2", {"the window": 64}),
        ("gemma3_text", {"the window": 64}),
        ("llama4_text", {"the window": 128}),
        ("gpt_oss", {"the window": 64, "the length before rope scaling": 64}),
        ("mamba2", {"the chunk of its recurrence": 64}),
        ("nemotron_h", {"the chunk of its recurrence": 64}),
        ("kimi_linear", {"the chunk of its recurrence": 64}),
        ("qwen3_next", {"the chunk of its recurrence": 64}),
        ("qwen2_moe", {}),
    ],
)
def test_windows_of_some_layers(base: str, limits: dict[str, int], tmp_path: Path) -> None:
    """They count as those of every layer do, and so do chunks, of attention or a recurrence."""
    parsed = translated(write_house(tmp_path, base, block_size=2))
    assert passage_texts.limits(parsed) == limits
    tokens = passage_texts.tokens(parsed, limits, None, "it")
    assert tokens == max([64, *(limit + 32 for limit in limits.values())])
    assert passage_texts.unreached(limits, tokens) is None


def test_a_short_context(tmp_path: Path) -> None:
    """The usual sample is as long as the context allows."""
    parsed = translated(write_house(tmp_path, block_size=2, max_positions=40))
    assert passage_texts.tokens(parsed, {}, None, "it") == 39


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("base", "rope"),
    [
        ("llama", {"rope_parameters": YARN | {"rope_theta": 1e4}}),
        ("llama", {"rope_scaling": YARN, "rope_parameters": None}),
        ("gemma3_text", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}),
    ],
)
def test_scaled_positions(base: str, rope: dict, tmp_path: Path) -> None:
    """Under either key, and of one kind of layers alone."""
    parsed = translated(write_house(tmp_path, base, block_size=2))
    parsed.config.update(rope)
    limits = passage_texts.limits(parsed)
    assert limits.pop("the length before rope scaling") == 128 and len(limits) == (base != "llama")
    one = {"the length before rope scaling": 128}
    said = "positions 0 to 127; the length before rope scaling of 128 was not reached"
    assert passage_texts.unreached(one, 128) == said
    assert passage_texts.unreached(one, 129) is None
    assert passage_texts.unreached({"the window": 200} | one, 64) == (
        "positions 0 to 63; the window of 200 and the length before rope scaling of 128 were not "
        "reached"
    )


def test_a_window_that_one_of_two_models_lost(tmp_path: Path) -> None:
    """A sample that ends within it could not tell them apart."""
    models = [*map(translated, without_its_window(tmp_path))]
    for pair in (models, models[::-1]):
        assert passage_texts.limits(*pair) == {"the window": WINDOW}


def test_the_report_names_unreached_limits() -> None:
    report = compare.Report(64, 0.0, 0.0, 0.0, 1.0, "the head", 0.0, {}, True)
    assert "was not reached" in verify.table(report, "the window was not reached")
    assert "reached" not in verify.table(report)


@pytest.mark.parametrize("write", [write_nanogpt, partial(write_kimi_names, block_layers=1)])
def test_no_prompt_to_run_code(
    write: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These checkpoints bring some along, and their tokenizers need none of it."""
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(prompt))
    assert passage_texts.passages(write(tmp_path), None, 8, 1)


def test_our_text_is_long_enough_for_any_passage() -> None:
    """It begins anew; a text of the user's does not."""
    first, second = passage_texts.passages(GOLDENS / BLOCK, None, 6000, 2)
    assert len(first) == len(second) == 6000 and first != second


def test_our_text_says_something_else_in_every_passage() -> None:
    first, second = map(set, passage_texts.passages(DEMO, None, 64, 2))
    assert min(len(second - first), len(first - second)) > 10


@pytest.mark.parametrize(("more", "found"), [(0, 1), (1, 2), (40, 3)])
def test_no_passage_is_compared_twice(more: int, found: int, tmp_path: Path) -> None:
    """A text of a passage's length is one passage, however many are asked for."""
    text = tmp_path / "text"
    text.write_text("".join(chr(ord("a") + i % 26) for i in range(20 + more)))
    passages = passage_texts.passages(GOLDENS / BLOCK, str(text), 20, 3)
    assert len(passages) == found == len({*map(tuple, passages)})


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    found = []
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + b"import os\r\n" * 9)
        found.append(passage_texts.passages(DEMO, str(tmp_path / name), 20, 1))
    assert found[0] == found[1]


@pytest.mark.parametrize("part", ["the head", "the site of the attention of layer 61"])
def test_a_report_has_80_columns(part: str) -> None:
    beyond = {f"the site of the MLP of layer {layer}": 1.0 for layer in range(40)}
    unreached = passage_texts.unreached(dict.fromkeys(("the window", "the chunk", "x"), 4096), 64)
    for parts in ({}, beyond):
        made = compare.Report(10**6, 1e-300, 1e-12, 1e-12, 1.0, part, 1e-6, parts, True)
        assert max(map(len, verify.table(made, unreached).splitlines())) <= 80
