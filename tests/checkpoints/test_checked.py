"""What is refused before a server starts: one sentence, exit status 2, no traceback."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GOLDENS, edit, write_house
from on_file import Sentence
from safetensors.torch import load_file
from serving import free_port

from attnres_serve import cli
from attnres_serve.checkpoints import checked
from attnres_serve.compat import openai_server
from attnres_serve.kernels.interface import MASKED
from attnres_serve.server import launcher
from attnres_serve.verify import oracle

GOLDEN = GOLDENS / "fla_transformer_block"  # five layers, block size 4, hidden size 64
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Refused = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden, to be damaged."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN, copy, ignore=shutil.ignore_patterns("expected.json"))
    return copy


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What would have been served; nothing here may start a server."""
    calls: list[tuple] = []
    monkeypatch.setattr(openai_server, "run_server", lambda *arguments: calls.append(arguments))
    monkeypatch.setenv("VLLM_PLUGINS", "")  # so that what the launcher sets is undone
    return calls


@pytest.fixture
def refusal(started: list[tuple], capfd: pytest.CaptureFixture) -> Callable[..., str]:
    """Serve, be refused in exactly one line, and return that line."""

    def serve(*arguments: Any) -> str:
        status = cli.main(["serve", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert (status, started, out) == (2, [], "")
        assert err.startswith("attnres-serve: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return serve


@pytest.fixture
def refused(refusal: Callable[..., str], sentence: Sentence) -> Refused:
    """Serve and be refused in the sentence on file."""
    return lambda *arguments: sentence.check(refusal(*arguments))


def test_an_intact_copy_is_served(folder: Path, started: list[tuple]) -> None:
    """The tests below prove something only if the copy is accepted before it is damaged."""
    port = free_port()
    assert cli.main(["serve", str(folder), "--port", str(port), "--dtype", "float32"]) == 0
    ((model, defaults, flags, settings, keys, _),) = started
    assert (model, settings, keys) == (str(folder), {}, [])
    assert {"host": "127.0.0.1", "port": 8000, "allowed_origins": []}.items() <= defaults.items()
    assert flags == ["--port", str(port), "--dtype", "float32"]


@pytest.mark.parametrize(
    ("stated", "flags", "compiled"),
    [
        ("float16", [], ["float16"]),
        ("bfloat16", ["--dtype=auto"], ["bfloat16"]),
        ("float32", [], ["bfloat16"]),  # as vLLM takes it
        (None, [], ["bfloat16"]),  # of float32 weights
        ("bfloat16", ["--dtype", "half"], ["float16"]),
        ("float16", ["--dtype=float"], ["float32"]),
        ("float16", ["--attnres-backend", "torch"], []),
    ],
)
def test_the_dtype_that_is_compiled_ahead(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    stated: str | None,
    flags: list[str],
    compiled: list[str],
) -> None:
    """Another one would cost a first start the time of two."""
    result: list[str] = []
    monkeypatch.setattr(launcher.library, "compile_ahead", result.append)
    edit(folder, dtype=stated, torch_dtype=None)
    assert cli.main(["serve", str(folder), "--port", str(free_port()), *flags]) == 0
    assert result == compiled


def test_the_configuration_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is judged is what is served."""
    read = []
    original = checked.read_config
    monkeypatch.setattr(checked, "read_config", lambda path: read.append(path) or original(path))
    assert launcher.check_checkpoint(str(folder))[0] == str(folder)
    assert read == [folder]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


WINDOW = {"sliding_window": 16, "use_sliding_window": True}
SOME_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
OTHER_MODELS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [
        WINDOW | {"max_window_layers": 2},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"head_dim": 16},  # which vLLM does not give to it
    ],
    # The usual size of a head, 128, is no function of the other sizes.
    "qwen3": [SOME_LAYERS, WINDOW | SOME_LAYERS, {"head_dim": ...}],
    "llama": [
        # A window that vLLM would give to other layers.
        {"sliding_window": 16},
        # What vLLM's own code reads and Hugging Face's class does not.
        {"bias": True},
        {"logit_scale": 0.5},
        {"is_causal": False},
        {"text_config": {}},
        # What neither reads, so that the model was trained by another class.
        {"residual_multiplier": 0.2},
        # A final query is left over.
        {"attn_res": {"block_size": 2, "final_mix": False}},
        # Values.
        {"attention_bias": 0},
        {"max_position_embeddings": "512"},
        {"rms_norm_eps": None},
        {"hidden_act": "gelu"},
        {"dtype": "bogus"},
        {"bos_token_id": "1"},
        {"eos_token_id": [2, "x"]},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 3},
        {"head_dim": 31},
        {"layer_types": ["full_attention"]},
        {"layer_types": 7},
        {"sliding_window": 0},
        # Rotary embeddings.
        {"rope_theta": 0},
        {"rope_parameters": 7},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_scaling": YARN | {"beta_fast": 16}},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 64.5}},
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        {"rope_theta": None, "rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3 | {"rope_theta": None}},
        {"max_position_embeddings": 10**30},
    ],
}


@pytest.mark.parametrize(
    ("base", "changes"),
    [(base, changes) for base, every in OTHER_MODELS.items() for changes in every],
    ids=str,
)
def test_base_families_that_would_be_another_model(
    base: str, changes: dict[str, Any], tmp_path: Path, refused: Refused
) -> None:
    """A key that changes the model is read as its class reads it, or refused; ... leaves it out."""
    folder = write_house(tmp_path / "house", base, layers=2, block_size=2)
    checked.check_folder(folder)
    refused(edit(folder, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": 1.0, "num_experts": 0, "qkv_bias": False, "is_causal": True},
        {"partial_rotary_factor": 1, "pruned_heads": {}, "_attn_implementation_autoset": True},
        {"unsloth_version": "2025.1", "initializer_range": None, "use_cache": "x"},
        {"_flash_attn_2_enabled": True, "use_flash_attn": True, "attn_pdrop": 0.1},
    ],
    ids=repr,
)
def test_keys_that_say_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """Other keys are left out of what vLLM sees, so they cannot change the model."""
    folder = write_house(tmp_path / "house", block_size=2)
    edit(folder, **changes)
    parsed = checked.check_folder(folder).parsed
    assert parsed is not None
    assert set(changes) & set(parsed.config) <= {"initializer_range", "use_cache"}


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"attention_factor": None, "beta_fast": 32, "beta_slow": 1, "mscale": None},
        LLAMA3 | {"partial_rotary_factor": 1.0},
        {"rope_type": "default", "factor": 1.0},
    ],
    ids=str,
)
def test_rotary_embeddings_that_state_what_is_usual(rope: dict, tmp_path: Path) -> None:
    folder = write_house(tmp_path / "house", block_size=2)
    edit(folder, rope_parameters=None, rope_scaling=rope, torch_dtype="torch.bfloat16")
    assert checked.check_folder(folder).parsed is not None
    oracle.load(folder)


# --- the folder and config.json


def test_a_file(folder: Path, refused: Refused) -> None:
    """The weights' file in the place of their folder."""
    refused(folder / WEIGHTS)


def test_no_config(folder: Path, refused: Refused) -> None:
    """A folder without config.json."""
    (folder / "config.json").unlink()
    refused(folder)


@pytest.mark.parametrize(
    "changes",
    [
        # Base tensors of another shape: vLLM would cut the larger weight without a word.
        {"intermediate_size": 48},
        {"num_kv_heads": 2},
        {"vocab_size": 300},
        # Keys that FLA does not have.
        *({key: 16} for key in ("rotary_dim", "attnres_null_source", "rope_parameters")),
        # Models that are no AttnRes, keys of unknown unit, and block sizes that FLA has not.
        {"model_type": "gpt_neo", "attnres_block_size": None},
        {"model_type": "llama", "attn_res_block_size": 2},
        {"model_type": "llama"},
        {"architectures": ["FooForCausalLM"]},
        *({"attnres_block_size": size} for size in (0, -4, 3, "4", True, 4.5)),
        # Standard residuals beside trained queries would silently be another function.
        {"attnres_block_size": None},
    ],
    ids=str,
)
def test_configurations(changes: dict[str, Any], folder: Path, refused: Refused) -> None:
    refused(edit(folder, **changes))


# --- tensors


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.attn_res_proj.weight",
        "model.layers.4.mlp_res_proj.weight",
        "model.layers.3.mlp_res_norm.weight",
        "model.res_proj.weight",
        "model.res_norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.attn.o_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensors(name: str, folder: Path, refused: Refused) -> None:
    """A missing query is never taken as zero, a missing head never as tied."""
    edit(folder, lambda tensors: tensors.pop(name))
    refused(folder)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        # One layer too many: FLA's attention query of layer 5, numbered like the final site.
        ("model.layers.5.attn_res_proj.weight", "model.res_proj.weight"),
        ("model.layers.5.mlp_res_norm.weight", "model.res_norm.weight"),
        ("model.layers.0.attn_res_bias", "model.res_norm.weight"),
        ("model.final_res_proj.weight", "model.res_proj.weight"),
        ("model.layers.5.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"),
        ("model.layers.0.attn.q_proj.bias", "model.res_norm.weight"),
        ("model.layers.0.attn.q_norm.weight", "model.res_norm.weight"),
    ],
)
def test_left_over_tensors(name: str, like: str, folder: Path, refused: Refused) -> None:
    """A tensor that the configuration has no place for is named, never dropped."""
    edit(folder, lambda tensors: tensors.update({name: tensors[like].clone()}))
    refused(folder)


BIAS = "model.layers.1.mlp_res_bias"  # of site 3, which reads two blocks and a partial sum


@pytest.mark.parametrize(
    "bias",
    [
        None,
        torch.zeros(4),
        torch.zeros(()),
        torch.zeros(3).bfloat16(),
        torch.zeros(3).double(),
        torch.full((3,), MASKED),
    ],
    ids=str,
)
def test_a_bias_for_every_source(
    bias: torch.Tensor | None, tmp_path: Path, refused: Refused
) -> None:
    folder = write_house(tmp_path / "x", block_size=2, attn_res={"source_bias": True})
    edit(folder, lambda tensors: tensors.update({BIAS: torch.tensor([0.0, MASKED, 1.0])}))
    checked.check_folder(folder)
    edit(folder, lambda t: t.pop(BIAS) if bias is None else t.update({BIAS: bias}))
    refused(folder)


QUERY, KEY_NORM = "model.layers.2.attn_res_proj.weight", "model.layers.2.mlp_res_norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # Too many, too few, or turned round.
        (QUERY, lambda tensor: tensor.new_zeros(2, 64)),
        (QUERY, lambda tensor: tensor.T),
        (KEY_NORM, lambda tensor: tensor[:32]),
        (KEY_NORM, lambda tensor: tensor[None]),
        ("model.res_proj.weight", lambda tensor: tensor.new_zeros(1, 65)),
        (UP, lambda tensor: tensor.T),
        # Quantised, of which config.json says nothing: vLLM would take the stored numbers for the
        # weights, without their scales.
        (UP, lambda tensor: tensor.to(torch.int8)),
        (UP, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        (UP, lambda tensor: tensor.to(torch.bool)),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], folder: Path, refused: Refused
) -> None:
    refused(edit(folder, lambda tensors: tensors.update({name: change(tensors[name]).clone()})))


# --- files


@pytest.mark.parametrize(
    "name",
    [
        *("pytorch_model.bin", "model.pt", "last.ckpt", "weights.pth"),
        *("__0_0.distcp", "pytorch_model_fsdp_0", "global_step500", "adapter_model.safetensors"),
    ],
)
def test_weights_of_other_kinds(name: str, folder: Path, refused: Refused) -> None:
    """By their names; a pickle is not read."""
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(folder)


@pytest.mark.parametrize(
    "size", [0, 4, 20, 500, 200_000, -1], ids=["empty", "length", "header", "header", "half", "end"]
)
def test_truncated_weights(size: int, folder: Path, refused: Refused) -> None:
    """Cut in the length field, in the header, in the data, and by a single byte."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:size])
    refused(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4000000\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, POINTER) for name in (WEIGHTS, "config.json", INDEX)),
        # Broken, empty, not text, or JSON of another kind.
        *(("config.json", text) for text in (b"{", b"", b"\xff\xfe{}", b"[]", b"null", b"{}")),
        *((INDEX, text) for text in (b"{", b"", b"[]", b"{}")),
        *((INDEX, {"weight_map": table}) for table in (None, [1])),
        # A shard's name of a wrong type is a missing file, not a crash.
        *((INDEX, {"weight_map": {"a": name}}) for name in (5, None, ["x"], "")),
        # A shard that is not there, and an index that is stale.
        (INDEX, {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}),
        (INDEX, {"weight_map": {"a": "model-00001-of-00002.safetensors"}}),
    ],
    ids=repr,
)
def test_files_of_other_content(name: str, content: Any, folder: Path, refused: Refused) -> None:
    given = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(given)
    refused(folder)


def test_a_tensor_in_two_files(folder: Path, refused: Refused) -> None:
    """Which one would be served depends on the order of reading."""
    shutil.copyfile(folder / WEIGHTS, folder / "second.safetensors")
    refused(folder)


@pytest.mark.parametrize(
    "name", ["weights/a.safetensors", "../a.safetensors", "a.st", "{}/b/c.safetensors"]
)
def test_an_index_of_files_that_vllm_does_not_look_at(
    name: str, folder: Path, refused: Refused
) -> None:
    name = name.format(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    names = [*load_file(folder / WEIGHTS)]
    (folder / WEIGHTS).rename(folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    refused(folder)


@pytest.mark.parametrize("name", ["model-q4.gguf", "Mini-K3-1H-v2-F16-00001-of-00002.gguf"])
def test_gguf_files(name: str, folder: Path, refused: Refused) -> None:
    """Mostly there is no config.json beside them, or the file itself is given."""
    (folder / name).write_bytes(b"GGUF")
    refused(folder / name)
    (folder / WEIGHTS).unlink()
    (folder / "config.json").unlink()
    refused(folder)


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin", None])
def test_a_folder_of_an_adapter(weights: str | None, tmp_path: Path, refused: Refused) -> None:
    """As PEFT saves it, without a config.json."""
    (tmp_path / "adapter_config.json").write_text("{}")
    if weights:
        (tmp_path / weights).touch()
    refused(tmp_path)


def test_an_adapter_beside_the_weights(folder: Path, refused: Refused) -> None:
    shutil.copyfile(folder / WEIGHTS, folder / "adapter_model.safetensors")
    refused(folder)


def test_a_link_to_nothing(folder: Path, refused: Refused) -> None:
    """As in a Hugging Face cache that was cleaned."""
    (folder / WEIGHTS).rename(folder / "blob")
    (folder / WEIGHTS).symlink_to("blob")
    (folder / "blob").unlink()
    refused(folder)


def test_a_byte_order_mark(folder: Path, refused: Refused) -> None:
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    refused(folder)


@pytest.mark.parametrize(
    "prefix",
    [
        *("_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module."),
        *("_forward_module.", "base_model.model."),
        *("model.", "student.", "net.inner."),  # a trainer's own module, whose name nobody knows
    ],
)
def test_names_of_a_model_in_another(prefix: str, folder: Path, refused: Refused) -> None:
    def wrap(tensors: dict) -> None:
        for name in [*tensors]:
            tensors[prefix + name] = tensors.pop(name)

    refused(edit(folder, wrap))
    target = folder.parent / "target"
    assert cli.main(["convert", str(folder), str(target), "--rename", f"{prefix}*=*"]) == 0
    assert load_file(target / WEIGHTS).keys() == load_file(GOLDEN / WEIGHTS).keys()


def test_names_of_wrapped_layers(folder: Path, refused: Refused) -> None:
    name = "model.layers.1.attn.q_proj.weight"
    wrapped = name.replace("attn.", "_fsdp_wrapped_module.attn.")
    edit(folder, lambda tensors: tensors.update({wrapped: tensors.pop(name)}))
    refused(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.attn.bias", "model.layers.0.attn.masked_bias"),
        *("model.layers.0.attn.rotary.inv_freq", "model.layers.0.attn.rotary.cos_cached"),
        *("model.layers.0.attn.mask", "model.layers.1.self_attn.bias", "model.causal_mask"),
        *("model.freqs_cis", "model.layers.0.attention.tril", "model.attn_mask"),
    ],
)
def test_buffers(name: str, dtype: torch.dtype, folder: Path, refused: Refused) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4, dtype=dtype)}))
    refused(folder)


# --- address and model id


def test_port_in_use(folder: Path, refused: Refused, sentence: Sentence) -> None:
    """Before vLLM has spent a minute on loading."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        sentence.places[str(port)] = "{port}"
        refused(folder, "--port", port)


@pytest.mark.parametrize("port", [70000, 65536, -1])
def test_port_out_of_range(port: int, folder: Path, refused: Refused) -> None:
    """No such port; the resolver itself would take 70000 for 4464."""
    refused(folder, f"--port={port}")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "999.1.1.1", "x" * 64 + ".invalid"])
def test_host_that_is_none(host: str, folder: Path, refusal: Callable[..., str]) -> None:
    """A name that does not resolve, an address that is none, a name that no resolver takes."""
    assert f"{host}:8000 cannot be bound" in refusal(folder, "--host", host)


def test_the_checkpoint_is_judged_before_the_port(tmp_path: Path, refused: Refused) -> None:
    """Of two mistakes the checkpoint's is told."""
    refused(tmp_path / "missing", "--port", "70000")


@pytest.mark.parametrize(
    "name", ["", "x" * 300, "~no-such-user/model", "a\0b"], ids=["none", "long", "~", "0"]
)
def test_names_that_no_system_call_takes(name: str, refused: Refused) -> None:
    """An empty one, as in ``serve "$UNSET"``, is not the demo's."""
    refused(name)


def test_unknown_model_id(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, an id that is not in the cache is told apart from a path."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/no-such-attnres-model")


def test_no_name_where_there_is_no_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """A wheel has no demo checkpoint."""
    monkeypatch.setattr(launcher.attnres_serve, "__file__", str(tmp_path / "a" / "b.py"))
    refused()
