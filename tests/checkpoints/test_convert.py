"""``attnres-serve convert``: every value bit for bit, nothing run, all or nothing.

That a converted model computes the same is judged by the float64 oracle, which reads both formats
by code of its own: its logits must be equal, not close.
"""

import json
import os
import pickle
import random
import signal
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import scaled_eps
import torch
from checkpoints import GOLDENS, edit, write_fla, write_house, write_nanogpt, write_standard
from goldens import bound
from hub import MODEL, cached
from hypothesis import given, settings
from hypothesis import strategies as st
from on_file import Sentence
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from attnres_serve import cli, formats
from attnres_serve.checkpoints import checked
from attnres_serve.checkpoints import read as weights
from attnres_serve.checkpoints.convert import command as convert_module
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.checkpoints.write import SafetensorsFile
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats import fla
from attnres_serve.verify.oracle import load

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
IDS = [5, 17, 300, 2, 99, 41, 5, 17, 256, 8]
Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a folder, none of them twice."""
    result: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not result.keys() & tensors.keys()
        result |= tensors
    return result


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(actual[name]) == bits(tensor), name


def split(tensors: Tensors, count: int, seed: int = 0) -> list[Tensors]:
    """The tensors in so many groups, shuffled, so that layers lie across files."""
    names = list(tensors)
    random.Random(seed).shuffle(names)
    return [{name: tensors[name] for name in names[i::count]} for i in range(count)]


def write_shards(folder: Path, groups: list[Tensors], pickled: bool) -> None:
    """Replace a folder's weights by shards with Hugging Face's names and index."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    table = {}
    for number, group in enumerate(groups, 1):
        name = f"{stem}-{number:05}-of-{len(groups):05}.{suffix}"
        if pickled:
            torch.save(group, folder / name)
        else:
            save_file(group, folder / name, metadata={"format": "pt"})
        table |= dict.fromkeys(group, name)
    index = {"metadata": {}, "weight_map": table}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def as_pickle(
    folder: Path,
    made_of: Callable[[Tensors], Any] = lambda tensors: tensors,
    name: str = "pytorch_model.bin",
    **options: Any,
) -> Tensors:
    """Put a pickle of the folder's weights, or what is made of them, in their place.

    Returns:
        The weights.
    """
    tensors = load_file(folder / WEIGHTS)
    torch.save(made_of(tensors), folder / name, **options)
    (folder / WEIGHTS).unlink()
    return tensors


def assert_converted(source: Path, tensors: Tensors) -> None:
    """A converted checkpoint has these tensors, bit for bit."""
    target = source.with_name("target")
    convert(str(source), str(target))
    assert_same_bits(tensors_of(target), tensors)


def assert_served(folder: Path) -> None:
    assert checked.check_folder(folder).parsed is not None


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture, sentence: Sentence) -> Callable:
    """Convert into a new folder, be refused in the sentence on file, and leave nothing."""

    def run(source: object, *options: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        capfd.readouterr()
        status = cli.main(["convert", str(source), str(tmp_path / "out"), *options])
        out, err = capfd.readouterr()
        assert (status, out) == (2, "")
        assert err.startswith("attnres-serve: ") and err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        sentence.check(err)

    return run


# --- pickles


def pickle_legacy(folder: Path) -> Tensors:
    return as_pickle(folder, _use_new_zipfile_serialization=False)


def pickle_trainer(folder: Path) -> Tensors:
    """What a trainer writes: the weights under a key, its state and arguments beside them."""
    for name in ("optimizer.pt", "training_args.bin", "rng_state_0.pth"):
        (folder / name).write_bytes(b"never read")
    state = {"optimizer": {"lr": 0.1}, "step": 7}
    return as_pickle(folder, lambda tensors: {"model": tensors, **state}, "last.pt")


def pickle_parameters(folder: Path) -> Tensors:
    """Parameters of a module, one of them not contiguous."""

    def parameters(tensors: Tensors) -> dict[str, torch.nn.Parameter]:
        state = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
        name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
        state[name] = torch.nn.Parameter(tensors[name].T.contiguous().T)
        assert not state[name].is_contiguous()
        return state

    return as_pickle(folder, parameters)


def pickle_shards(folder: Path) -> Tensors:
    tensors = load_file(folder / WEIGHTS)
    write_shards(folder, split(tensors, 3), pickled=True)
    return tensors


@pytest.mark.parametrize(
    "pickled", [as_pickle, pickle_legacy, pickle_trainer, pickle_parameters, pickle_shards]
)
@pytest.mark.parametrize("write", [write_fla, write_house, write_nanogpt])
def test_pickles_become_safetensors(write: Callable, pickled: Callable, tmp_path: Path) -> None:
    """The same names, values and types, fused or not, and config.json byte for byte."""
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, block_size=4)
    expected = load(source).logprobs(IDS)
    tensors = pickled(source)
    convert(str(source), str(target))
    assert_same_bits(tensors_of(target), tensors)
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert torch.equal(load(target).logprobs(IDS), expected)
    assert_served(target)
    shards = 3 if pickled is pickle_shards else 1
    assert len(list(target.glob("*.safetensors"))) == shards
    assert (target / INDEX).exists() == (shards > 1)


def test_bits_that_arithmetic_would_lose(tmp_path: Path) -> None:
    """NaNs with a payload, infinities, negative zero and denormals survive, in every type."""
    source = write_house(tmp_path / "source", block_size=4)
    tensors = load_file(source / WEIGHTS)
    generator = torch.Generator().manual_seed(1)
    for name, dtype in zip(tensors, (torch.bfloat16, torch.float16, torch.float32) * 99):  # noqa: B905
        size = tensors[name].numel() * dtype.itemsize
        noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        tensors[name] = noise.view(dtype).reshape(tensors[name].shape)
    as_pickle(source, lambda _: tensors)
    assert_converted(source, tensors)


def test_a_tied_head_stays_tied(tmp_path: Path, refused: Callable) -> None:
    """A pickle holds the embedding twice; the copy goes, unless it is not one."""
    source = write_fla(tmp_path / "source", tie=True)
    expected = load(source).logprobs(IDS)
    embedding = "model.embeddings.weight"
    tensors = as_pickle(source, lambda own: own | {"lm_head.weight": own[embedding]})
    for name, options in (("kept", {}), ("house", {"to_house": True})):
        convert(str(source), str(tmp_path / name), **options)
        actual = tensors_of(tmp_path / name)
        assert "lm_head.weight" not in actual and len(actual) == len(tensors)
        assert torch.equal(load(tmp_path / name).logprobs(IDS), expected)
    other = tensors[embedding].clone()
    other[3, 5] += 1
    torch.save(tensors | {"lm_head.weight": other}, source / "pytorch_model.bin")
    refused(source)


def test_an_untied_head_that_shares_memory_is_written_twice(tmp_path: Path) -> None:
    """What the configuration calls two weights are two weights."""
    source = write_house(tmp_path / "source", block_size=4)
    tensors = load_file(source / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    as_pickle(source, lambda _: tensors)
    assert_converted(source, tensors)


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("forced", [False, True], ids=["", "unsafe loading asked for"])
@pytest.mark.parametrize("kind", ["archive", "legacy", "raw", "tensor beside it"])
def test_a_malicious_pickle_is_refused_and_not_run(
    kind: str, forced: bool, tmp_path: Path, refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment asks torch to load unsafely."""
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    source = write_fla(tmp_path / "source")
    marker, file = tmp_path / "marker", source / "pytorch_model.bin"
    extra = {"b": torch.ones(2)} if kind == "tensor beside it" else {}
    evil = {**extra, "a": Malicious(marker)}
    as_pickle(source, lambda _: evil, _use_new_zipfile_serialization=kind != "legacy")
    if kind == "raw":
        file.write_bytes(pickle.dumps(evil))
    refused(source)
    assert not marker.exists()
    with file.open("rb") as content:  # the test proves something only if the file is malicious
        if kind == "raw":
            pickle.load(content)
        else:
            torch.load(content, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"a": torch.ones(2)}, "args": Namespace(lr=1)},
        {"a": torch.ones(2), "step": 7},
        {3: torch.ones(2)},
        [torch.ones(2)],
        {},
        {"a": torch.ones(2).to_sparse()},
        {"a": torch.ones(2, dtype=torch.complex64)},
    ],
    ids=lambda value: "",
)
def test_pickles_of_more_or_other_than_tensors(
    content: Any, tmp_path: Path, refused: Callable
) -> None:
    source = write_fla(tmp_path / "source")
    as_pickle(source, lambda _: content)
    refused(source)


def of_shards() -> torch.Tensor:
    """A tensor of which other processes could hold parts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)])
    return tensor.redistribute(mesh, [Replicate()])


def freed() -> torch.Tensor:
    tensor = torch.ones(4, 2)
    tensor.untyped_storage().resize_(0)
    return tensor


def jagged(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=layout)


VALUELESS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(4, 2, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.empty(4, 2, device="meta")),
    "bf16": lambda: torch.empty(4, dtype=torch.bfloat16, device="meta"),
    "no elements": lambda: torch.empty(0, 2, device="meta"),
    "shards": of_shards,
    "freed": freed,
    "jagged": lambda: jagged(torch.jagged),
    "nested": lambda: jagged(torch.strided),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quint8": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "uint16": lambda: torch.ones(4, dtype=torch.uint16),
}


@pytest.mark.parametrize("kind", VALUELESS)
@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["", "dry run"])
def test_pickled_tensors_without_plain_values(
    kind: str, options: tuple[str, ...], tmp_path: Path, refused: Callable
) -> None:
    """Refused by tensor and file, before anything is written, and by a dry run too."""
    source = write_house(tmp_path / "source", block_size=2)
    name = "model.layers.0.self_attn.q_proj.weight"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of kinds that are new or old
        as_pickle(source, lambda tensors: tensors | {name: VALUELESS[kind]()})
    refused(source, *options)


def test_numbers_that_were_never_written(tmp_path: Path, refused: Callable) -> None:
    """torch reads them as zeros; an archive without any checksums is another matter."""
    source = write_house(tmp_path / "source", block_size=2)
    with torch.serialization.skip_data():
        tensors = as_pickle(source)
    refused(source)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, source / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_converted(source, tensors)


def test_views_are_written_by_their_values(tmp_path: Path) -> None:
    """Strides, offsets, one storage for several and signs that are not applied yet."""
    source = write_house(tmp_path / "source", block_size=2)
    tensors = load_file(source / WEIGHTS)
    stem = "model.layers.0.self_attn."
    query, key, norm = f"{stem}q_proj.weight", f"{stem}k_proj.weight", "model.norm.weight"
    both = torch.cat([tensors[query], tensors[key]])
    views = {query: both[: len(tensors[query])], key: both[len(tensors[query]) :]}
    views["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous().T
    views[norm] = torch._neg_view(-tensors[norm])
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = torch.ones(1, dtype=tensors[name].dtype).expand(tensors[name].shape)
    as_pickle(source, lambda _: tensors | views)
    assert_converted(source, tensors)


@pytest.mark.parametrize("size", [None, 0, 100, -1], ids=["junk", "empty", "start", "cut"])
def test_damaged_pickles(size: int | None, tmp_path: Path, refused: Callable) -> None:
    """No stack trace, whatever torch makes of it."""
    source = write_fla(tmp_path / "source")
    as_pickle(source)
    file = source / "pytorch_model.bin"
    file.write_bytes(b"hello, world" if size is None else file.read_bytes()[:size])
    refused(source)


def test_torchscript_is_refused(tmp_path: Path, refused: Callable) -> None:
    """An archive of code."""
    source = write_fla(tmp_path / "source")
    (source / WEIGHTS).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), source / "model.pt")
    refused(source)


def test_which_pickle_is_meant(tmp_path: Path, refused: Callable) -> None:
    """Two without an index, a shard missing, a name in two shards, none at all."""
    source = write_fla(tmp_path / "source")
    tensors = as_pickle(source, name="a.pt")
    torch.save(tensors, source / "b.pt")
    refused(source)
    for path in source.glob("*.pt"):
        path.unlink()
    refused(source)
    first, second = split(tensors, 2)
    name = next(iter(first))
    write_shards(source, [first, second | {name: first[name]}], pickled=True)
    refused(source)
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    refused(source)


def test_lr_attnres_is_refused_by_name(tmp_path: Path, refused: Callable) -> None:
    """A pickle without a config.json, named itself or in a folder."""
    file = tmp_path / "lr" / "model.pt"
    file.parent.mkdir()
    torch.save({"model": {"transformer.attn_residuals.3.query": torch.ones(4)}}, file)
    refused(file)
    refused(file.parent)


# --- the house format


@pytest.mark.parametrize("name", sorted(folder.name for folder in GOLDENS.iterdir()))
def test_goldens_in_the_house_format(name: str, tmp_path: Path) -> None:
    """Float64 logits equal to the last bit, and what the golden's own code expects.

    Queries have the shape of the house format, whatever they had.
    """
    convert(str(GOLDENS / name), str(tmp_path / "house"), to_house=True)
    queries = [t for name, t in tensors_of(tmp_path / "house").items() if "_res_proj" in name]
    assert {tensor.shape[0] for tensor in queries} == {1}
    case = json.loads((GOLDENS / name / "expected.json").read_text())[1]
    ids = case["prompt"] + case["output"]
    house, original = load(tmp_path / "house").logprobs(ids), load(GOLDENS / name).logprobs(ids)
    parsed = checked.check_folder(GOLDENS / name).parsed
    fused = hasattr(formats.by_name(parsed.format), "parts")
    # One product of a fused matrix and three of its parts round differently.
    assert (house - original).abs().max() <= (1e-12 if fused else 0)
    for position, want in enumerate(case["output_logprobs"], len(case["prompt"]) - 1):
        assert abs(house[position, ids[position + 1]].item() - want) <= bound(want)
    assert_served(tmp_path / "house")


OPTIONS = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "block_size": st.sampled_from([1, 2, 4, 6]),
        "kv_heads": st.sampled_from([None, 1, 2]),
        "intermediate": st.sampled_from([None, 96]),
        "qk_norm": st.booleans(),
        "qkv_bias": st.booleans(),
        "tie": st.booleans(),
        "window_size": st.sampled_from([None, 4]),
        "norm_eps": st.sampled_from([1e-6, 1e-5, 1e-3]),
        "rope_theta": st.sampled_from([10000.0, 500.0]),
        "dtype": st.sampled_from(["bfloat16", "float32", "float16"]),
        "seed": st.integers(0, 10**6),
    }
)


@settings(max_examples=25, deadline=None)
@given(options=OPTIONS, shards=st.integers(1, 4), pickled=st.booleans())
def test_any_fla_checkpoint_in_the_house_format(
    options: dict[str, Any], shards: int, pickled: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same float64 logits, the same bits, the same number of files, and a passed check."""
    root = tmp_path_factory.mktemp("round")
    source = write_fla(root / "fla", vocab=64, scale=0.1, **options)
    ids = [token % 64 for token in IDS]
    expected = load(source).logprobs(ids)
    tensors = load_file(source / WEIGHTS)
    write_shards(source, split(tensors, shards, options["seed"]), pickled)
    convert(str(source), str(root / "house"), to_house=True)
    assert torch.equal(load(root / "house").logprobs(ids), expected)
    renamed = {fla.rename(name): tensor for name, tensor in tensors.items()}
    assert_same_bits(tensors_of(root / "house"), renamed)
    assert len(list((root / "house").glob("*.safetensors"))) == shards
    assert_served(root / "house")


def test_shards_and_their_index(tmp_path: Path) -> None:
    """Hugging Face's names; the index agrees with the files."""
    source = write_fla(tmp_path / "source")
    tensors = load_file(source / WEIGHTS)
    write_shards(source, split(tensors, 3), pickled=False)
    convert(str(source), str(tmp_path / "house"), to_house=True)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "house").glob("*.safetensors")) == names
    index = json.loads((tmp_path / "house" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    table = {}
    for name in names:
        with safe_open(tmp_path / "house" / name, framework="pt") as file:
            table |= dict.fromkeys(file.keys(), name)
    assert index["weight_map"] == table and len(table) == len(tensors)


def test_every_type_and_shape_in_one_file(tmp_path: Path) -> None:
    """Written in any order and read by safetensors itself; every tensor lies aligned."""
    tensors = {
        f"{dtype}{list(shape)}": torch.randint(0, 2, shape).to(dtype)
        for dtype in weights.DTYPES
        for shape in ((), (3,), (1, 5), (0, 2), (3, 3))
    }
    names = random.sample(list(tensors), len(tensors))
    path = tmp_path / "x.safetensors"
    headers = {name: weights.header(name, tensors[name], path) for name in names}
    with SafetensorsFile(path, headers) as file:
        for name in reversed(names):
            file.write(name, tensors[name], lambda count: None)
    assert_same_bits(load_file(path), tensors)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % tensors[name].itemsize == 0


def test_nothing_to_convert(tmp_path: Path, refused: Callable) -> None:
    """Safetensors of a format that is kept are left alone."""
    house = write_house(tmp_path / "house", block_size=4)
    refused(house)
    refused(house, "--to", "house")
    refused(GOLDENS / "fla_transformer_block")


def test_what_has_no_place_in_the_house_format(tmp_path: Path, refused: Callable) -> None:
    """Standard residuals, and names inside a quantisation."""
    twin = write_fla(tmp_path / "twin", block_size=None)
    refused(twin, "--to", "house")
    quantised = write_fla(tmp_path / "quantised")
    edit(quantised, quantization_config={"quant_method": "x", "ignore": ["lm_head"]})
    refused(quantised, "--to", "house")


@pytest.mark.parametrize("lost", [{"qk_norm_eps": None}, {"config": {"rope_theta": 1.0}}], ids=str)
def test_a_translation_that_the_house_format_cannot_express(
    lost: dict[str, Any], tmp_path: Path, refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a later format adds to a parsed, it is not lost without a word."""
    source = write_fla(tmp_path / "source", qk_norm=True)
    house = formats.by_name("house")
    changed = replace(house, translate=lambda c: replace(house.translate(c), **lost))
    monkeypatch.setitem(formats.SERVED, "house", changed)
    refused(source, "--to", "house")


# --- zero queries


@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_zero_queries(base: str, size: int, tmp_path: Path) -> None:
    """What the tests' own maker makes, in the type of the model, with key norms of one."""
    source = write_standard(tmp_path / "source", base)
    convert(str(source), str(tmp_path / "target"), zero_queries_block_size=size)
    other = write_house(tmp_path / "other", base, block_size=size, zero_queries=True)
    expected = tensors_of(other)
    expected |= {name: torch.ones_like(t) for name, t in expected.items() if "_res_norm" in name}
    assert_same_bits(tensors_of(tmp_path / "target"), expected)
    ids = IDS[:5]
    assert torch.equal(load(tmp_path / "target").logprobs(ids), load(other).logprobs(ids))
    assert_served(tmp_path / "target")


def test_zero_queries_of_fla_without_attnres(tmp_path: Path) -> None:
    """The twin is renamed on the way; its function is the one with n^2 eps at every site."""
    source = write_fla(tmp_path / "twin", block_size=None, qk_norm=True, scale=0.02)
    convert(str(source), str(tmp_path / "house"), to_house=True, zero_queries_block_size=3)
    scaled = scaled_eps.load(source, [0, 3]).logprobs(IDS)
    assert (load(tmp_path / "house").logprobs(IDS) - scaled).abs().max() < 1e-9
    assert (load(source).logprobs(IDS) - scaled).abs().max() > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"model_type": ["llama"]},
        {"architectures": 5},
        {"auto_map": {"AutoModelForCausalLM": "x.Y"}},
        {"intermediate_size": 40},
        {"logit_scale": 0.5},
        {"attn_res_block_size": 2},
    ],
    ids=str,
)
def test_models_that_get_no_queries(
    changes: dict[str, Any], tmp_path: Path, refused: Callable
) -> None:
    """Another family, part of a model, code of its own, and what would be served wrongly."""
    source = write_standard(tmp_path / "source")
    edit(source, **changes)
    refused(source, "--add-zero-queries", "--block-size", "2")


def test_a_harmless_key_does_not_keep_a_model_from_queries(tmp_path: Path) -> None:
    """It means nothing to the model, so it is left behind."""
    source = write_standard(tmp_path / "source")
    edit(source, trained_by="someone")
    convert(str(source), str(tmp_path / "target"), zero_queries_block_size=2)
    assert "trained_by" not in json.loads((tmp_path / "target" / "config.json").read_text())


def test_models_that_have_queries(refused: Callable) -> None:
    refused(GOLDENS / "fla_transformer_block", "--add-zero-queries", "--block-size", "2")


@pytest.mark.parametrize(
    "options",
    [("--add-zero-queries",), ("--block-size", "2"), ("--add-zero-queries", "--block-size", "0")],
    ids=" ".join,
)
def test_block_sizes_that_are_refused(
    options: tuple[str, ...], tmp_path: Path, refused: Callable
) -> None:
    refused(write_standard(tmp_path / "source"), *options)


# --- what else is in the folder


def test_other_files(tmp_path: Path) -> None:
    """Tokenizer, templates and generation settings as they are; nothing else."""
    source = write_fla(tmp_path / "source")
    as_pickle(source)
    kept = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"}
    kept |= {"generation_config.json", "chat_template.jinja", "merges.txt", "vocab.json", "LICENSE"}
    left = {"README.md", "modeling_x.py", "tokenizer_x.py", "tokenizer.bin", "training_args.bin"}
    for number, name in enumerate(sorted(kept | left)):
        if not (source / name).exists():
            (source / name).write_bytes(b"\xff" * number)
    (source / "tokenizer.bin").unlink()  # it would be a second pickle
    (source / "tokenizer_extras").mkdir()
    convert(str(source), str(tmp_path / "target"))
    result = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    assert result.keys() == kept | {"config.json", WEIGHTS}
    assert all(result[name] == (source / name).read_bytes() for name in kept)


def test_a_model_in_the_hugging_face_cache(tmp_path: Path, monkeypatch) -> None:
    """Its files are links there, and are files in the target."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub", GOLDENS / "fla_transformer_block")
    convert(MODEL, str(tmp_path / "house"), to_house=True)
    assert not any(path.is_symlink() for path in (tmp_path / "house").iterdir())
    house, golden = load(tmp_path / "house"), load(GOLDENS / "fla_transformer_block")
    assert torch.equal(house.logprobs(IDS), golden.logprobs(IDS))


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Says what is then written, and writes nothing."""
    source = write_fla(tmp_path / "source")
    write_shards(source, split(load_file(source / WEIGHTS), 2), pickled=True)
    (source / "README.md").write_text("a card")
    target = tmp_path / "target"
    before = sorted(tmp_path.rglob("*"))
    convert(str(source), str(target), to_house=True, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    first, _, promised = capsys.readouterr().out.partition("\n")
    assert first == f"{target} would hold:"
    convert(str(source), str(target), to_house=True)
    first, _, done = capsys.readouterr().out.partition("\n")
    assert first == f"{target} was written:" and done == promised
    listed = {line.split()[0] for line in promised.splitlines() if line.startswith("  ")}
    assert listed - {"not"} == {path.name for path in target.iterdir()}
    assert "not taken over: README.md" in promised and "format        house" in promised


# --- all or nothing


def test_an_existing_target_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    """A folder, even an empty one, a file, a link that leads nowhere; none of them is touched."""
    source = str(GOLDENS / "fla_transformer_block")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "file", "link"):
        for dry in (False, True):
            place = str(tmp_path / name)
            sentence.raises(SettingError, convert, source, place, to_house=True, dry_run=dry)
    assert not list((tmp_path / "folder").iterdir())
    assert (tmp_path / "file").read_text() == "kept"
    for place in (tmp_path / "missing" / "target", tmp_path / "file" / "target"):
        sentence.raises(SettingError, convert, source, str(place), to_house=True)


def test_a_target_that_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder could be replaced by the rename; it is not."""
    original = convert_module.check_folder
    target = tmp_path / "target"
    monkeypatch.setattr(convert_module, "check_folder", lambda f: (target.mkdir(), original(f))[1])
    with pytest.raises(SettingError, match="exists already"):
        convert(str(GOLDENS / "fla_transformer_block"), str(target), to_house=True)
    assert list(tmp_path.iterdir()) == [target] and not list(target.iterdir())


def test_the_result_is_judged_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit short, and there is no target."""
    original = SafetensorsFile.__exit__

    def cut(self: SafetensorsFile, *error: Any) -> None:
        original(self, *error)
        path = Path(self._file.name)
        path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(SafetensorsFile, "__exit__", cut)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        convert(str(GOLDENS / "fla_transformer_block"), str(tmp_path / "target"), to_house=True)
    assert not list(tmp_path.iterdir())


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before the first byte."""
    usage = SimpleNamespace(free=100_000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SettingError, match=r"needs \d+\.\d kB, but .* has only 100\.0 kB free"):
        convert(str(GOLDENS / "fla_transformer_block"), str(tmp_path / "target"), to_house=True)
    assert not list(tmp_path.iterdir())


SCRIPT = """
import os, resource, signal, sys
from attnres_serve import cli
from attnres_serve.checkpoints.write import SafetensorsFile
number, limit = map(int, sys.argv[1:3])
original, count = SafetensorsFile.write, 0
def write(self, *arguments):
    global count
    count += 1
    if count == 5 and number:
        os.kill(os.getpid(), number)
    original(self, *arguments)
SafetensorsFile.write = write
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
status = cli.main(sys.argv[3:])
sys.stdout.flush()
os._exit(status)  # what is imported besides may write at the end
"""


def in_a_process(folder: Path, number: int = 0, limit: int = -1) -> tuple[int, str, str]:
    """Convert in a process that gets a signal while it writes, or may not write large files.

    Returns:
        Its status, and what it wrote to stdout and stderr; the target is in ``folder / "place"``.
    """
    script, out, err = (folder / name for name in ("convert.py", "out", "err"))
    script.write_text(SCRIPT)
    (folder / "place").mkdir()
    places = GOLDENS / "fla_transformer_block", folder / "place" / "target"
    words = map(str, (script, number, limit, "convert", *places, "--to", "house"))
    status = forks.python(*words, log=out, env={**os.environ}, err=err).wait(120)
    return status, out.read_text(), err.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(number: int, tmp_path: Path) -> None:
    assert in_a_process(tmp_path, number) == (130, "", "attnres-serve: interrupted.\n")
    assert not list((tmp_path / "place").iterdir())


def test_without_an_interruption_the_same_process_converts(tmp_path: Path) -> None:
    """The two tests beside this one prove something only if the rest of their script works."""
    status, _, err = in_a_process(tmp_path)
    assert (status, err) == (0, "")
    assert_served(tmp_path / "place" / "target")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow, as it does on a full disk."""
    status, out, err = in_a_process(tmp_path, limit=200_000)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path / 'place' / 'target'} cannot be written" in err
    assert not list((tmp_path / "place").iterdir())


def test_a_folder_that_cannot_be_made_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is somebody else's."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "same")
    other = tmp_path / ".target.same.unfinished"
    other.mkdir()
    with pytest.raises(SettingError, match=r"cannot be written .*File exists"):
        convert(str(GOLDENS / "fla_transformer_block"), str(tmp_path / "target"), to_house=True)
    assert other.is_dir()


def test_all_of_it_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, the folder of their names, and the folder's own name."""
    source = write_fla(tmp_path / "source")
    write_shards(source, split(load_file(source / WEIGHTS), 2), pickled=False)
    target, synced = tmp_path / "target", []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), target.exists()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    convert(str(source), str(target), to_house=True)
    before = {Path(path) for path, exists in synced if not exists}
    (unfinished,) = {path for path in before if path.name.endswith(".unfinished")}
    assert {path.name for path in before - {unfinished}} == {p.name for p in target.iterdir()}
    assert {"config.json", INDEX} < {path.name for path in before}
    assert synced[-1] == (str(tmp_path), True)


def anonymous_memory() -> int:
    """Bytes of this process that are no mapped file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@pytest.mark.parametrize("pickled", [True, False])
def test_memory(pickled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than one large tensor is held, of several: they are mapped and written in pieces."""
    size, rows = 48 << 20, 3 << 16
    source = write_fla(tmp_path / "source", hidden=64, vocab=64)
    tensors = load_file(source / WEIGHTS)
    for name in ("model.embeddings.weight", "lm_head.weight"):
        tensors[name] = torch.arange(64.0 * rows).view(rows, 64)
        assert tensors[name].nbytes == size
    edit(source, vocab_size=rows)
    (source / WEIGHTS).unlink()
    if pickled:
        torch.save(tensors, source / "pytorch_model.bin")
    else:
        save_file(tensors, source / WEIGHTS)
    del tensors
    before, seen = anonymous_memory(), []
    original = SafetensorsFile.write

    def write(self: SafetensorsFile, name: str, tensor: torch.Tensor, progress: Callable) -> None:
        def watched(count: int) -> object:
            seen.append(anonymous_memory())
            return progress(count)

        original(self, name, tensor, watched)

    monkeypatch.setattr(SafetensorsFile, "write", write)
    convert(str(source), str(tmp_path / "target"), to_house=True)
    assert max(seen) - before < size
    result = load_file(tmp_path / "target" / WEIGHTS)["lm_head.weight"]
    assert torch.equal(result, torch.arange(64.0 * rows).view(rows, 64))
