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


def renamed(part: str, other: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update(
        {name.replace(part, other): tensors.pop(name) for name in [*tensors]}
    )


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
    "edit",
    [
        # tables that PEFT saved
        with_(TABLE, OWN_TABLE + 1),
        with_(HEAD_TABLE, OWN_TABLE * 2),
        # tensors of another kind
        with_(f"{STEM}.lora_magnitude_vector", torch.ones(12)),
        with_("base_model.model.model.norm.weight", torch.ones(8)),
        # halves
        without(B),
        # ranks that adapter_config.json does not state
        with_(A, torch.ones(8, 8)),
        lambda tensors: tensors.update({A: torch.ones(8, 8), B: torch.ones(12, 8)}),
        with_(A, torch.ones(8)),
        # values
        spoilt(A, float("nan")),
        spoilt(B, float("inf")),
        with_(A, torch.ones(4, 8, dtype=torch.int8)),
        # layers of another model
        with_(A, torch.ones(4, 4)),
        with_(B, torch.ones(6, 4)),
        lambda tensors: tensors.update(
            {
                f"base_model.model.{EMBEDDING}.lora_embedding_A": torch.ones(4, 8),
                f"base_model.model.{EMBEDDING}.lora_embedding_B": torch.ones(20, 4),
            }
        ),
        renamed("self_attn.q_proj", "conv.conv"),
        renamed("layers.1", "layers.9"),
        renamed("self_attn.q_proj", "mlp_res_proj"),
        lambda tensors: tensors.clear(),
    ],
)
def test_a_tensor_that_would_be_left_out_or_wrong(edit, tmp_path, sentence):
    sentence.check(problem(write(tmp_path / "adapter", edit)))


def test_numbers_that_the_served_type_cannot_hold(tmp_path, sentence):
    folder = write(tmp_path / "adapter", spoilt(A, 70000.0))
    assert problem(folder) is None and problem(folder, dtype=torch.bfloat16) is None
    sentence.check(problem(folder, dtype=torch.float16))


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": None},
        {"lora_alpha": "16"},
        {"r": 0},
        {"rank_pattern": {"q_proj": "4"}},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj(": 4}},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"lora_bias": True},
        {"use_something_new": True},
        {"init_lora_weights": "olora"},
        {"rank_pattern": {"o_proj": 32}},
        {"peft_type": "IA3"},
    ],
    ids=str,
)
def test_a_configuration_that_says_more_than_lora(config, tmp_path, sentence):
    sentence.check(problem(write(tmp_path / "adapter", keep, **config)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", None),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b"{}"),
        ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", b"\0" * 7),
    ],
)
def test_a_folder_that_is_not_whole(name, content, tmp_path, sentence):
    folder = write(tmp_path / "adapter", keep)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    sentence.check(problem(folder))


def test_a_pickle_is_read_by_its_tensors_alone(tmp_path, sentence):
    folder = write(tmp_path / "adapter", keep)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    assert problem(folder) is None
    tensor = torch.ones(2, 2)
    for content in ({"a": tmp_path}, {"a": 1.0}, {1: tensor}, [tensor], tensor):
        torch.save(content, folder / "adapter_model.bin")
        sentence.check(problem(folder))


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
    ("reason", "edit", "status"),
    [
        (None, keep, None),
        (None, without(A), 400),
        (RuntimeError(WRAPPED), keep, 400),
        (SettingError("the LoRA adapter 'mine' is none."), keep, 400),
        (RuntimeError("out of memory"), keep, 500),
    ],
)
def test_a_refusal_is_the_clients_and_one_sentence(
    over_http, reason, edit, status, tmp_path, sentence
):
    answer, asked = over_http(reason, write(tmp_path / "adapter", edit))
    if status is None:
        assert answer.startswith("Success")
        return
    assert answer.error.code == HTTPStatus(status)
    sentence.check(answer.error.message)
    assert bool(asked) == (reason is not None)  # what the files show costs the engine nothing


def test_adapters_that_were_not_switched_on(over_http, tmp_path, sentence):
    answer, _ = over_http(None, tmp_path, lora=False)
    assert answer.error.code == 400
    sentence.check(answer.error.message)


# --- before the start


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("base")
    return write_house(root / "base", "llama", layers=4, block_size=3, seed=1)


def test_adapters_of_flags_are_checked_before_the_start(base, tmp_path, sentence):
    def check(*words: str) -> None:
        assert launcher.check_checkpoint(str(base), of_server([*words]))[0] == str(base)

    def refused(*words: str) -> None:
        sentence.raises(SettingError, check, *words)

    tensors = load_file(base / WEIGHTS)
    folder = tmp_path / "adapter"
    write_adapter(folder, tensors, [QUERY, EMBEDDING])
    words = ["--enable-lora", "--lora-modules", f"mine={folder}"]
    check(*words)
    check(*words[:1])
    refused(*words[1:])
    refused(*words, "--max-lora-rank=1")
    as_json = json.dumps({"name": "mine", "path": str(folder)})
    check("--enable_lora", f"--lora_modules={as_json}")
    refused(*words, "{}")
    refused(*words, f"other={tmp_path / 'nowhere'}", "--port", "1")
    check(*words, "far=someone/model")

    refused(*words, f"mine={folder}")
    served = ["--served-model-name", "big"]
    check(*words, *served)
    refused(*words, *served, "mine")

    path = folder / "adapter_model.safetensors"
    own, saved = load_file(path), tensors[f"{EMBEDDING}.weight"]
    for table in (saved, saved.float(), saved.double()):
        save_file(own | {TABLE: table}, path)
        check(*words)
    for table in (saved + 1, saved[:-1], torch.cat([saved, saved])):
        save_file(own | {TABLE: table}, path)
        refused(*words)
    save_file({A: torch.ones(4, 9), B: torch.ones(12, 4)}, path)
    refused(*words)
