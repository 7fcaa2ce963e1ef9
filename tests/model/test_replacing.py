"""Updates of a model's weights, tensor by tensor, without an engine."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import quantised, write_fla, write_house
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

import in_process
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)

from attnres_serve.compat import drafts
from attnres_serve.errors import CheckpointError
from attnres_serve.model import replacing

SHAPE = {"layers": 2, "block_size": 3, "dtype": "float32"}
FORMATS = ("llama", "qwen3_moe", "fla", "tied", "deepseek_v2", "mamba2", "alice_ai", "llama_int8")
Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


def write(folder: Path, name: str, seed: int) -> Path:
    if name == "fla":
        return write_fla(folder, layers=2, seed=seed, dtype="float32")
    if name == "tied":
        return write_house(folder, "qwen3", seed=seed, tie=True, **SHAPE)
    if name.endswith("_int8"):
        base = write(folder.parent / f"{folder.name} base", name.removesuffix("_int8"), seed)
        return quantised(folder, base)
    return write_house(folder, name, seed=seed, **SHAPE)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("updates")
    for name in FORMATS:
        for seed in (1, 2):
            write(root / f"{name} {seed}", name, seed)
    with in_process.world(root / "qwen3_moe 1"):  # which needs a group of experts
        yield root


def tensors(world: Path, name: str, seed: int) -> Tensors:
    return load_file(world / f"{name} {seed}" / WEIGHTS)


@pytest.fixture
def worker(world: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A worker with a model that started on the first checkpoint of a format."""
    name = getattr(request, "param", "llama")
    config = in_process.vllm_config(world / f"{name} 1", max_model_len=64)
    with set_current_vllm_config(config):
        yield started(config, tensors(world, name, 1))


def started(config: Any, weights: Tensors) -> Any:
    model = initialize_model(vllm_config=config)
    model.load_weights(iter(weights.items()))
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return SimpleNamespace(
        get_model=lambda: model,
        model_config=config.model_config,
        vllm_config=config,
        model_runner=SimpleNamespace(),
    )


def fresh(worker: Any, weights: Tensors) -> Any:
    """Another worker of the same model, that started on some weights."""
    config = in_process.vllm_config(Path(worker.model_config.model), max_model_len=64)
    with set_current_vllm_config(config):
        return started(config, weights)


def values(worker: Any) -> Tensors:
    """What a model computes with, as far as it can be seen: products of its linear layers too."""
    model = worker.get_model()
    found = {name: one.detach().clone() for name, one in model.state_dict().items()}
    for name, module in model.named_modules():
        others = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for key, one in others.items():  # what was absorbed, and views
            if isinstance(one, torch.Tensor) and one.numel():
                found[f"{name}.{key} beside"] = one.detach().clone()
        if callable(product := getattr(module, "cpu_linear", None)) and hasattr(module, "weight"):
            width = getattr(module, "input_size", getattr(module, "embedding_dim", 0))
            x = torch.linspace(-1, 1, 2 * width).view(2, width)
            found[f"{name} product"] = product(x, module.weight, None)
    return found


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def send(worker: Any, sent: Tensors, is_partial: bool = False) -> None:
    update = replacing.begin(worker, is_partial=is_partial)
    names = [*sent]
    random.shuffle(names)
    for name in names:
        update.take(name, sent[name])
    update.apply()


@pytest.mark.parametrize("worker", FORMATS, indirect=True)
def test_an_update_in_any_order_and_by_house_names(
    worker: Any, world: Path, request: pytest.FixtureRequest
) -> None:
    """The same as a model that started on it, and back again."""
    name = request.node.callspec.params["worker"]
    first, second = (tensors(world, name, seed) for seed in (1, 2))
    before, wanted = values(worker), values(fresh(worker, second))
    assert not same(before, wanted)
    send(worker, second)
    assert same(values(worker), wanted)
    index = worker.get_model().attn_res_index(False)
    send(worker, dict(pair for name in first for pair in index.pieces(name, first[name])))
    assert same(values(worker), before)


@pytest.mark.parametrize("worker", ["alice_ai"], indirect=True)
def test_references_to_a_parameter_follow_the_new_one(worker: Any, world: Path) -> None:
    """A router has the bias of its gate."""
    gates = [one for one in worker.get_model().modules() if hasattr(one, "e_score_correction_bias")]
    assert gates
    before = [one.e_score_correction_bias for one in gates]
    send(worker, tensors(world, "alice_ai", 2))
    for gate, bias in zip(gates, before, strict=True):
        assert gate.e_score_correction_bias is bias
    second = tensors(world, "alice_ai", 2)
    wanted = [name for name in second if name.endswith("e_score_correction_bias")]
    assert wanted and any(torch.equal(second[wanted[0]], bias) for bias in before)


@pytest.mark.parametrize("worker", ["qwen3_moe"], indirect=True)
def test_an_update_with_packed_experts(worker: Any, world: Path) -> None:
    """As transformers holds them in memory."""
    second = tensors(world, "qwen3_moe", 2)
    wanted = values(fresh(worker, second))
    packed = {name: tensor for name, tensor in second.items() if ".experts." not in name}
    for layer in range(2):
        within = f"model.layers.{layer}.mlp.experts"
        each = [
            [second[f"{within}.{number}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for number in range(sum(f"{within}.{n}.up_proj.weight" in second for n in range(99)))
        ]
        packed[f"{within}.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
        packed[f"{within}.down_proj"] = torch.stack([one[2] for one in each])
    send(worker, packed)
    assert same(values(worker), wanted)


NAME = "model.layers.1.mlp.down_proj.weight"


def without(sent: Tensors) -> Tensors:
    return {name: tensor for name, tensor in sent.items() if name != NAME}


def with_one(sent: Tensors, value: float) -> Tensors:
    wrong = sent[NAME].clone()
    wrong[3, 5] = value
    return sent | {NAME: wrong}


BAD = {
    "missing": (without, "lacks the tensor model.layers.1.mlp.down_proj.weight"),
    "half of a pair": (
        lambda sent: {n: t for n, t in sent.items() if "1.self_attn.k_proj" not in n},
        "lacks the tensor model.layers.1.self_attn.k_proj.weight",
    ),
    "a query": (
        lambda sent: {n: t for n, t in sent.items() if n != "model.layers.1.mlp_res_proj.weight"},
        "lacks the query of",
    ),
    "unknown": (lambda sent: sent | {"model.more.weight": torch.ones(2)}, "model.more.weight"),
    "misshapen": (lambda sent: sent | {NAME: sent[NAME][:-1]}, "down_proj.weight has the shape"),
    "not a number": (lambda sent: with_one(sent, torch.nan), "down_proj.weight holds nan"),
    "infinite": (lambda sent: with_one(sent, torch.inf), "down_proj.weight holds inf"),
    "whole numbers": (lambda sent: sent | {NAME: sent[NAME].long()}, "down_proj.weight holds I64"),
    "no tensor": (lambda sent: sent | {NAME: [1.0]}, "is a list; expected a tensor"),
    "no values": (lambda sent: sent | {NAME: sent[NAME].to("meta")}, "has no values"),
    "a wrapper's name": (
        lambda sent: {f"_orig_mod.{n}": t for n, t in sent.items()},
        "of a wrapper",
    ),
    "nothing": (lambda sent: {}, "lacks"),
}


@pytest.mark.parametrize(("spoil", "said"), BAD.values(), ids=[*BAD])
def test_a_bad_update_changes_nothing(spoil: Any, said: str, worker: Any, world: Path) -> None:
    """And a good one is taken after it."""
    before, second = values(worker), tensors(world, "llama", 2)
    with pytest.raises(CheckpointError) as caught:
        send(worker, spoil(second))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert same(values(worker), before)
    send(worker, second)
    assert same(values(worker), values(fresh(worker, second)))


def test_a_tensor_that_comes_twice(worker: Any, world: Path) -> None:
    update = replacing.begin(worker)
    update.take(NAME, tensors(world, "llama", 2)[NAME])
    with pytest.raises(CheckpointError, match=r"both .*down_proj.weight and .*down_proj.weight"):
        update.take(NAME, tensors(world, "llama", 2)[NAME])


def test_a_tensor_that_its_owner_changes_later(worker: Any, world: Path) -> None:
    """A trainer goes on while an update is not finished."""
    second = tensors(world, "llama", 2)
    wanted = values(fresh(worker, second))
    update = replacing.begin(worker)
    for name, tensor in second.items():
        update.take(name, tensor)
        tensor.zero_()
    update.apply()
    assert same(values(worker), wanted)


PARTS = ("self_attn.q_proj", "res_proj", "mlp.up_proj")


def test_a_partial_update_keeps_the_rest(worker: Any, world: Path, tmp_path: Path) -> None:
    """The rest is that of the folder and of earlier partial updates."""
    mixed, second = tensors(world, "llama", 1), tensors(world, "llama", 2)
    for part in PARTS:
        sent = {name: tensor for name, tensor in second.items() if part in name}
        mixed |= sent
        send(worker, sent, is_partial=True)
        assert same(values(worker), values(fresh(worker, mixed)))
    before = values(worker)
    with pytest.raises(CheckpointError, match="has the shape"):
        send(worker, {NAME: second[NAME][:-1]}, is_partial=True)
    assert same(values(worker), before)
    send(worker, second)
    with pytest.raises(CheckpointError, match="the other tensors came from a trainer"):
        send(worker, {NAME: second[NAME]}, is_partial=True)


def of_folder(folder: Path) -> Any:
    """A worker that started on a checkpoint."""
    config = in_process.vllm_config(folder, max_model_len=64)
    with set_current_vllm_config(config):
        return started(config, load_file(folder / WEIGHTS))


def test_a_partial_update_of_a_tied_model_that_stores_its_head(world: Path, tmp_path: Path) -> None:
    """The head comes with the embedding, whichever was stored or sent before."""
    folder, name = write(tmp_path / "tied", "tied", 1), "model.embed_tokens.weight"
    first, second = load_file(folder / WEIGHTS), tensors(world, "tied", 2)
    head = {"lm_head.weight": first[name].clone()}
    save_file(first | head, folder / WEIGHTS, metadata={"format": "pt"})
    worker = of_folder(folder)
    with set_current_vllm_config(worker.vllm_config):
        before = values(worker)
        with pytest.raises(CheckpointError, match="tied"):
            send(worker, {"lm_head.weight": second[name]}, is_partial=True)
        assert same(values(worker), before)
        both = {name: second[name], "lm_head.weight": second[name].clone()}
        for sent in ({name: second[name]}, both, {name: first[name]}):
            send(worker, sent, is_partial=True)
            wanted = first | {name: sent[name], "lm_head.weight": sent[name].clone()}
            assert same(values(worker), values(fresh(worker, wanted)))
        send(worker, second)  # a trainer does not send it
        wanted = second | {"lm_head.weight": second[name].clone()}
        assert same(values(worker), values(fresh(worker, wanted)))


def test_a_folder_that_changes_while_it_is_read(
    worker: Any, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded is not what was validated, and is not served."""
    folder = write(tmp_path / "new", "llama", 2)
    validate = replacing.check_replacement

    def and_change(model: Any, name: str) -> None:
        validate(model, name)
        save_file(tensors(world, "llama", 1), folder / WEIGHTS, metadata={"more": "x"})

    monkeypatch.setattr(replacing, "check_replacement", and_change)
    with pytest.raises(CheckpointError, match="whose files have changed"):
        replacing.from_folder(worker, str(folder))
    assert worker.attn_res_broken == {"target"}
    monkeypatch.undo()
    replacing.from_folder(worker, str(folder))
    assert not worker.attn_res_broken


def test_a_draft_of_another_folder_gets_no_tensors_of_a_head(
    worker: Any, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may store a head that vLLM takes no drafts from."""
    monkeypatch.setattr(replacing, "is_draft", lambda name, _: name == NAME)
    worker.get_model().attn_res_draft_head = frozenset()
    monkeypatch.setattr(drafts, "draft_model", lambda _: 1 / 0)
    for is_partial in (True, False):
        send(worker, tensors(world, "llama", 2), is_partial)


def test_a_draft_does_not_make_the_target_whole(worker: Any, world: Path) -> None:
    """Each model of a worker is whole or not."""
    worker.attn_res_broken = {"target"}
    draft = fresh(worker, tensors(world, "llama", 1)).get_model()
    second = tensors(world, "llama", 2)
    replacing.renew(worker, draft, worker.model_config, second.items)
    assert worker.attn_res_broken == {"target"}
    worker.attn_res_broken = {"draft"}
    send(worker, second)
    assert worker.attn_res_broken == {"draft"}


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_partial_update_of_files_that_change(
    meanwhile: bool, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the update, or while the rest of it is read."""
    folder, second = write(tmp_path / "own", "llama", 1), tensors(world, "llama", 2)
    worker = of_folder(folder)

    def change(*_: Any) -> None:
        validate(*_)
        save_file(second, folder / WEIGHTS, metadata={"format": "pt", "more": "x"})

    with set_current_vllm_config(worker.vllm_config):
        before, validate = values(worker), replacing.check_replacement
        if meanwhile:
            monkeypatch.setattr(replacing, "check_replacement", change)
        else:
            change(worker.get_model(), str(folder))
        message = "^the rest of the update was being read" if meanwhile else "files have changed"
        with pytest.raises(CheckpointError, match=message):
            send(worker, {NAME: second[NAME]}, is_partial=True)
        assert same(values(worker), before)


def test_a_failure_in_the_middle_is_known(
    worker: Any, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are not whole then, until an update has come to its end."""
    second, model = tensors(world, "llama", 2), worker.get_model()
    monkeypatch.setattr(type(model), "load_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        send(worker, second)
    assert worker.attn_res_broken == {"target"}
    monkeypatch.undo()
    send(worker, second)
    assert not worker.attn_res_broken
    assert same(values(worker), values(fresh(worker, second)))


def test_an_engine_without_drafts(worker: Any) -> None:
    worker.vllm_config.speculative_config = None
    with pytest.raises(CheckpointError, match="has no draft model"):
        replacing.begin(worker, is_draft_model=True)
