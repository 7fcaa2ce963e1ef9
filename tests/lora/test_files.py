"""The folder of a LoRA adapter: every tensor of it is used, or refused by its name."""

import json
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import WEIGHTS, write_adapter
from checkpoints import write_house
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnres_serve.compat.arguments import of_server
from attnres_serve.compat.workarounds import adapter_refusals, whole_adapters
from attnres_serve.errors import SettingError
from attnres_serve.lora import files
from attnres_serve.server import launcher
from tests.compat.faults.adapter_refusals import WRAPPED, load

QUERY, VALUE = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
EMBEDDING = "model.embed_tokens"
NEEDED = {f"{QUERY}.weight": (12, 8), f"{VALUE}.weight": (6, 8), f"{EMBEDDING}.weight": (20, 8)}
CONVOLUTION = "model.layers.0.conv.conv"
STEM = f"base_model.model.{QUERY}"
A, B = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"
TABLE = f"base_model.model.{EMBEDDING}.base_layer.weight"
HEAD_TABLE = "base_model.model.lm_head.base_layer.weight"
OWN_TABLE = torch.arange(160.0).reshape(20, 8)
Tensors = dict[str, Tensor]


def write(folder: Path, edit: Callable[[Tensors], Any], **config: object) -> Path:
    """An adapter of two matrices and of the embedding, with other tensors and keys."""
    weights = {name: torch.zeros(shape) for name, shape in NEEDED.items()}
    write_adapter(folder, weights, [QUERY, VALUE, EMBEDDING])
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def problem(folder: Path, **known: Any) -> str | None:
    model = files.Model(
        **{
            "weight_shapes": NEEDED | {f"{CONVOLUTION}.weight": (12, 1, 3)},
            "max_rank": 16,
            "has_table": lambda leaf, table: torch.equal(table, OWN_TABLE),
        }
        | known
    )
    return files.problem(folder, model)


def keep(tensors: Tensors) -> None:
    """Change nothing."""


def with_(name: str, tensor: Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensor})


def without(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def spoilt(name: str, value: float) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


@pytest.mark.parametrize(
    ("edit", "config"),
    [
        (keep, {}),
        (keep, {"rank_pattern": {}, "alpha_pattern": None, "use_rslora": True, "lora_alpha": 3.5}),
        (keep, {"init_lora_weights": "gaussian", "task_type": "CAUSAL_LM"}),
        (with_(A, torch.ones(2, 8)), {"rank_pattern": {"q_proj": 2}}),
        (with_(TABLE, OWN_TABLE), {}),
        (with_(HEAD_TABLE, OWN_TABLE), {}),
    ],
)
def test_an_adapter_whose_tensors_are_all_applied(edit, config, tmp_path):
    def whole(tensors: Tensors) -> None:
        edit(tensors)
        if config.get("rank_pattern"):
            tensors[B] = torch.ones(12, 2)

    assert problem(write(tmp_path / "adapter", whole, **config)) is None


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        # tables that PEFT saved
        (with_(TABLE, OWN_TABLE + 1), f"holds {EMBEDDING}.base_layer.weight, a table other than"),
        (with_(HEAD_TABLE, OWN_TABLE * 2), "holds lm_head.base_layer.weight, a table other than"),
        # tensors of another kind
        (with_(f"{STEM}.lora_magnitude_vector", torch.ones(12)), f"{QUERY}.lora_magnitude_vector"),
        (
            with_("base_model.model.model.norm.weight", torch.ones(8)),
            "the tensor model.norm.weight, and vLLM applies lora_A and lora_B alone",
        ),
        # halves
        (without(B), f"holds lora_A of {QUERY} without lora_B"),
        # ranks that adapter_config.json does not state
        (with_(A, torch.ones(8, 8)), f"has the rank 4 and 8 in its tensors of {QUERY}"),
        (
            lambda tensors: tensors.update({A: torch.ones(8, 8), B: torch.ones(12, 8)}),
            f"has the rank 8 in its tensors of {QUERY}, and adapter_config.json states 4",
        ),
        (with_(A, torch.ones(8)), "expected two matrices"),
        # values
        (spoilt(A, float("nan")), f"holds {QUERY}.lora_A.weight with NaN or infinity"),
        (spoilt(B, float("inf")), f"holds {QUERY}.lora_B.weight with NaN or infinity"),
        (with_(A, torch.ones(4, 8, dtype=torch.int8)), "as torch.int8; expected float32"),
        # layers of another model
        (with_(A, torch.ones(4, 4)), "has the shapes [4, 4] and [12, 4] for"),
        (with_(B, torch.ones(6, 4)), "whose weight is [12, 8] by config.json; give the adapter"),
        (
            lambda tensors: tensors.update(
                {
                    f"base_model.model.{EMBEDDING}.lora_embedding_A": torch.ones(4, 8),
                    f"base_model.model.{EMBEDDING}.lora_embedding_B": torch.ones(20, 4),
                }
            ),
            f"has the shapes [4, 8] and [20, 4] for {EMBEDDING}",  # not of the transpose
        ),
        (
            lambda tensors: tensors.update(
                {key.replace("self_attn.q_proj", "conv.conv"): tensors.pop(key) for key in (A, B)}
            ),
            f"changes {CONVOLUTION}, which is no matrix but [12, 1, 3] by config.json",
        ),
        (
            lambda tensors: tensors.update(
                {key.replace("layers.1", "layers.9"): tensors.pop(key) for key in [*tensors]}
            ),
            "changes model.layers.9.self_attn.v_proj, which the model does not have",
        ),
        (
            lambda tensors: tensors.update(
                {
                    key.replace("self_attn.q_proj", "mlp_res_proj"): tensors.pop(key)
                    for key in (A, B)
                }
            ),
            "changes model.layers.0.mlp_res_proj, a part of depth attention",
        ),
        (lambda tensors: tensors.clear(), "has no tensor in adapter_model.safetensors"),
    ],
)
def test_a_tensor_that_would_be_left_out_or_wrong(edit, says, tmp_path):
    result = problem(write(tmp_path / "adapter", edit))
    assert result is not None and says in result and result.endswith(".") and "\n" not in result


def test_numbers_that_the_served_type_cannot_hold(tmp_path):
    folder = write(tmp_path / "adapter", spoilt(A, 70000.0))
    assert problem(folder) is None and problem(folder, dtype=torch.bfloat16) is None
    assert "infinite in float16" in (problem(folder, dtype=torch.float16) or "")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lora_alpha": None}, "has null as lora_alpha in adapter_config.json; expected a number"),
        ({"lora_alpha": "16"}, 'has "16" as lora_alpha'),
        ({"r": 0}, "has 0 as r in adapter_config.json; expected a whole number above 0"),
        ({"rank_pattern": {"q_proj": "4"}}, "as rank_pattern in adapter_config.json"),
        ({"alpha_pattern": ["q_proj"]}, "as alpha_pattern in adapter_config.json"),
        ({"alpha_pattern": {"q_proj(": 4}}, "a key of alpha_pattern"),
        ({"use_dora": True}, "has DoRA (use_dora in adapter_config.json)"),
        ({"modules_to_save": ["lm_head"]}, "has whole layers that were trained beside it"),
        ({"lora_bias": True}, "has biases (lora_bias"),
        ({"use_something_new": True}, "has use_something_new in adapter_config.json"),
        ({"init_lora_weights": "olora"}, "has init_lora_weights 'olora'"),
        (
            {"rank_pattern": {"o_proj": 32}},
            "has the rank 32 by adapter_config.json, and --max",
        ),
        ({"peft_type": "IA3"}, "is of PEFT's type 'IA3'"),
    ],
)
def test_a_configuration_that_says_more_than_lora(config, says, tmp_path):
    result = problem(write(tmp_path / "adapter", keep, **config))
    assert result is not None and says in result and result.endswith(".")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("adapter_config.json", None, "has no adapter_config.json in"),
        ("adapter_config.json", b"{", "has an adapter_config.json that cannot be read as JSON"),
        ("adapter_config.json", b"[]", "that is no JSON object"),
        ("adapter_config.json", b"{}", "has no r in adapter_config.json"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors in"),
        ("adapter_model.safetensors", b"\0" * 7, "damaged or truncated adapter_model.safetensors"),
    ],
)
def test_a_folder_that_is_not_whole(name, content, says, tmp_path):
    folder = write(tmp_path / "adapter", keep)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    result = problem(folder)
    assert result is not None and says in result and result.endswith(".") and "\n" not in result


def test_a_pickle_is_read_by_its_tensors_alone(tmp_path):
    folder = write(tmp_path / "adapter", keep)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    assert problem(folder) is None
    torch.save({"a": tmp_path}, folder / "adapter_model.bin")
    assert "damaged or truncated adapter_model.bin" in (problem(folder) or "")


# --- the table of a model that runs


@pytest.mark.parametrize("rows", [(0, 20), (8, 16), (16, 20)])
def test_a_worker_compares_its_rows_of_a_table(rows):
    pytest.importorskip("vllm")
    first, last = rows
    layer = nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
    layer.org_vocab_size = 20
    padded = torch.cat([OWN_TABLE[first:last], torch.zeros(4, 8)])
    layer.weight = nn.Parameter(padded.bfloat16(), requires_grad=False)
    model = nn.Module()
    model.embed_tokens = nn.Module()
    model.embed_tokens.base_layer = layer  # vLLM's wrapper
    model.lm_head = layer  # tied
    for leaf in ("embed_tokens", "lm_head"):
        assert whole_adapters._has_table(model, leaf, OWN_TABLE)
        assert not whole_adapters._has_table(model, leaf, OWN_TABLE + 2)
        assert not whole_adapters._has_table(model, leaf, torch.zeros(24, 8))
    assert not whole_adapters._has_table(nn.Module(), "lm_head", OWN_TABLE)
    model.lm_head = nn.Identity()  # of another stage
    assert whole_adapters._has_table(model, "lm_head", OWN_TABLE + 2)


# --- over HTTP


@pytest.fixture
def over_http(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    monkeypatch.setattr(
        OpenAIServingModels, "load_lora_adapter", OpenAIServingModels.load_lora_adapter
    )
    family = SimpleNamespace(shapes=lambda config: NEEDED)
    monkeypatch.setattr(adapter_refusals, "BY_ARCHITECTURE", {"AttnResLlamaForCausalLM": family})
    adapter_refusals.PATCH.apply()
    adapter_refusals.PATCH.apply()
    return load


@pytest.mark.parametrize(
    ("reason", "edit", "status", "says"),
    [
        (None, keep, None, "Success"),
        (None, without(A), 400, f"The LoRA adapter 'mine' holds lora_B of {QUERY} without lora_A;"),
        (
            RuntimeError(WRAPPED),
            keep,
            400,
            "The LoRA adapter 'mine' changes model.layers.0.x, to which vLLM applies no adapter.",
        ),
        (
            SettingError("the LoRA adapter 'mine' is none."),
            keep,
            400,
            "The LoRA adapter 'mine' is none.",
        ),
        (RuntimeError("out of memory"), keep, 500, "out of memory"),
    ],
)
def test_a_refusal_is_the_clients_and_one_sentence(over_http, reason, edit, status, says, tmp_path):
    answer, asked = over_http(reason, write(tmp_path / "adapter", edit))
    if status is None:
        assert answer.startswith(says)
        return
    assert answer.error.code == HTTPStatus(status) and answer.error.message.startswith(says)
    assert "\n" not in answer.error.message and "Worker failed" not in answer.error.message
    assert bool(asked) == (reason is not None)  # what the files show costs the engine nothing


def test_adapters_that_were_not_switched_on(over_http, tmp_path):
    answer, _ = over_http(None, tmp_path, lora=False)
    assert answer.error.code == 400 and answer.error.message == (
        "The LoRA adapter 'mine' needs a server that was started with --enable-lora."
    )


# --- before the start


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("base")
    return write_house(root / "base", "llama", layers=4, block_size=3, seed=1)


def refusal(base: Path, *words: str) -> str:
    with pytest.raises(SettingError) as caught:
        launcher.check_checkpoint(str(base), of_server([*words]))
    return str(caught.value)


def test_adapters_of_flags_are_checked_before_the_start(base, tmp_path):
    tensors = load_file(base / WEIGHTS)
    folder = tmp_path / "adapter"
    write_adapter(folder, tensors, [QUERY, EMBEDDING])
    words = ["--enable-lora", "--lora-modules", f"mine={folder}"]
    assert launcher.check_checkpoint(str(base), of_server(words))[0] == str(base)
    assert launcher.check_checkpoint(str(base), of_server(words[:1]))[0] == str(base)
    assert "without --enable-lora" in refusal(base, *words[1:])
    assert "has the rank 4 by" in refusal(base, *words, "--max-lora-rank=1")
    as_json = json.dumps({"name": "mine", "path": str(folder)})
    written = of_server(["--enable_lora", f"--lora_modules={as_json}"])
    assert launcher.check_checkpoint(str(base), written)
    assert "expected NAME=FOLDER" in refusal(base, *words, "{}")
    result = refusal(base, *words, f"other={tmp_path / 'nowhere'}", "--port", "1")
    assert result.startswith("the LoRA adapter 'other' is no folder at")
    assert launcher.check_checkpoint(str(base), of_server([*words, "far=someone/model"]))[0] == str(
        base
    )

    assert "found 'mine' twice" in refusal(base, *words, f"mine={folder}")
    served = ["--served-model-name", "big"]
    assert launcher.check_checkpoint(str(base), of_server([*words, *served]))[0] == str(base)
    result = refusal(base, *words, *served, "mine")
    assert result.startswith("found 'mine' after --lora-modules and after --served-model-name")

    path = folder / "adapter_model.safetensors"
    own, saved = load_file(path), tensors[f"{EMBEDDING}.weight"]
    for table in (saved, saved.float(), saved.double()):
        save_file(own | {TABLE: table}, path)
        assert launcher.check_checkpoint(str(base), of_server(words))[0] == str(base)
    for table in (saved + 1, saved[:-1], torch.cat([saved, saved])):
        save_file(own | {TABLE: table}, path)
        assert f"'mine' holds {EMBEDDING}.base_layer.weight, a table other" in refusal(base, *words)
    save_file({A: torch.ones(4, 9), B: torch.ones(12, 4)}, path)
    assert "has the shapes [4, 9] and [12, 4]" in refusal(base, *words)
