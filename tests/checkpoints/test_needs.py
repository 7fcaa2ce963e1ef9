"""What a server needs besides tensors: refused at once where vLLM would fail after its start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import linear_layers
from checkpoints import GOLDENS, quantised, write_house, write_standard
from checkpoints.tiktoken_files import BYTES as SINGLE_BYTES
from checkpoints.tiktoken_files import write_kimi
from cost import command, of_a_start
from on_file import Sentence
from safetensors.torch import load_file
from serving import DEMO

from attnres_serve import cli
from attnres_serve.checkpoints import needs, token_ids
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.compat import compiler, device, openai_server, source
from attnres_serve.compat.arguments import of_server
from attnres_serve.compat.device import Kind
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES

ORIGINAL = "original_max_position_embeddings"
BYTES = "tokenizer_config.json"
SIZES = [32, 64, 128]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "head_sizes", lambda: SIZES)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)


def required(folder: Path, *words: str) -> None:
    needs.check("m", check_folder(folder).translated("m"), folder, of_server(words))


def computes(size: int, dtype: torch.dtype) -> bool:
    """Whether vLLM's kernels for CPU attend with heads of this size, and rightly."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, block = 5, 128
    query = torch.randn(tokens, 2, size, dtype=dtype)
    key, value = torch.randn(2, tokens, 1, size, dtype=dtype)
    keys, values = torch.zeros(2, 1, 2 * block, size, dtype=dtype).chunk(2, dim=2)
    actual, isa = torch.zeros_like(query), _get_attn_isa(dtype, block, size)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    try:
        plan = ops.cpu_attn_get_scheduler_metadata(
            *(1, 2, 1, size, lengths, dtype, starts, True, -1, isa, False)
        )
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(tokens), isa)
        table = torch.zeros(1, 1, dtype=torch.int32)
        ops.cpu_attention_with_kv_cache(
            *(query, keys, values, actual, starts, lengths, size**-0.5, True, None, -1, table, 0.0),
            *(plan, None),
        )
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" in str(error):
            return False
        raise
    wide = (one.transpose(0, 1).double().expand(2, -1, -1) for one in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    # Numbers of size one in bfloat16, also on processors that lose two bits more; a wrong head, key
    # or scale is off by tenths.
    far = 5 * 2**-7
    torch.testing.assert_close(actual.double(), expected.transpose(0, 1), atol=far, rtol=far)
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sizes_of_heads_are_those_that_the_kernels_compute(dtype: torch.dtype) -> None:
    """No more, which would crash a worker, and no fewer, which would refuse what can be served."""
    pytest.importorskip("vllm")
    if not device.is_cpu():
        assert source.head_sizes() is None
        return
    assert source.head_sizes() == [size for size in range(2, 641, 2) if computes(size, dtype)]


def test_heads_that_this_device_does_not_compute(
    tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    write_house(tmp_path, block_size=2, head_dim=16)
    sentence.raises(CheckpointError, required, tmp_path)
    monkeypatch.setattr(source, "head_sizes", lambda: None)
    required(tmp_path)


@pytest.mark.parametrize("words", [["inspect", "{}", "--prompt", "x"], ["verify", "{}"]])
def test_other_engines_refuse_such_heads_too(
    words: list[str], tmp_path: Path, on_cpu: None, capfd: pytest.CaptureFixture
) -> None:
    write_house(tmp_path, block_size=2, head_dim=16)
    assert cli.main([word.format(tmp_path) for word in words]) == 2
    assert "heads of the size 16" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("files", "tokenizer", "has_template"),
    [
        ({"tokenizer.json": ""}, "tokenizer.json", False),
        ({"tokenizer.model": "", BYTES: "{}"}, "tokenizer.model", False),
        ({"vocab.json": "", "merges.txt": ""}, "vocab.json", False),
        ({BYTES: '{"tokenizer_class": "ByT5Tokenizer"}'}, BYTES, False),
        ({BYTES: '{"tokenizer_class": "LlamaTokenizer"}'}, None, False),
        ({BYTES: "["}, None, False),
        ({BYTES: '{"chat_template": "x"}'}, None, True),
        ({"chat_template.jinja": "x"}, None, True),
        ({}, None, False),
    ],
)
def test_a_tokenizer_and_a_chat_template_are_told_by_their_files(
    files: dict[str, str], tokenizer: str | None, has_template: bool, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert needs.tokenizer_file(tmp_path) == tokenizer
    assert needs.has_chat_template(tmp_path) is has_template


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> Path:
    write_house(tmp_path / "m", block_size=2)
    (tmp_path / "m" / "tokenizer.json").unlink()
    return tmp_path / "m"


def test_a_missing_tokenizer(without_tokenizer: Path) -> None:
    for words in ([], ["--no-skip-tokenizer-init"], ["--tokenizer", str(without_tokenizer)]):
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            required(without_tokenizer, *words)
    required(without_tokenizer, "--skip_tokenizer_init")
    required(without_tokenizer, "--tokenizer", str(GOLDENS / "nanogpt_block"))
    required(without_tokenizer, "--tokenizer", "lab/another")
    required(without_tokenizer, "--tokenizer-mode=mistral")


TOKENIZER, GENERATION, PAD = "tokenizer.json", "generation_config.json", "[PAD]"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4000000\n"


def edited(folder: Path, name: str, **changes: Any) -> None:
    """Change keys of a file of a checkpoint, which need not be there."""
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def with_pieces(folder: Path, count: int, **added: int) -> None:
    """Have a tokenizer of SentencePiece instead, with tokens that were added to it."""
    pieces = [b"\x0a" + bytes([len(text), *text]) for text in (b"%d" % n for n in range(count))]
    trainer = b"\x12\x03\x18\x80\x02"  # its own settings, behind the pieces
    content = b"".join(b"\x0a" + bytes([len(piece)]) + piece for piece in pieces)
    (folder / TOKENIZER).unlink()
    (folder / "tokenizer.model").write_bytes(content + trainer)
    (folder / "added_tokens.json").write_text(json.dumps(added))


def with_ranks(folder: Path, count: int) -> None:
    """Have Kimi's tokenizer instead, which has two tokens behind its ranks."""
    write_kimi(folder, [*SINGLE_BYTES, *(b"aa%d" % n for n in range(count - 256))])


def with_tokens(folder: Path, *added: str) -> None:
    """Have more tokens in tokenizer.json than its 320."""
    content = json.loads((folder / TOKENIZER).read_text())
    more = [{"id": 320 + number, "content": token} for number, token in enumerate(added)]
    edited(folder, TOKENIZER, added_tokens=[*content["added_tokens"], *more])


@pytest.fixture
def refused(capfd: pytest.CaptureFixture, sentence: Sentence) -> Callable[[Path], None]:
    """Be refused by ``check`` and ``serve`` in the same sentence, which is on file."""

    def run(folder: Path) -> None:
        assert cli.main(["check", str(folder)]) == 1
        err = capfd.readouterr().err
        sentence.check(err)
        assert cli.main(["serve", str(folder)]) == 2
        assert capfd.readouterr().err == err

    return run


@pytest.mark.parametrize(
    "edit",
    [
        lambda f: with_tokens(f, "<a>", "<b>"),
        lambda f: edited(f, BYTES, pad_token=PAD),
        lambda f: edited(f, BYTES, extra_special_tokens={"image_token": PAD}),
        lambda f: edited(f, BYTES, added_tokens_decoder={"320": {"content": PAD}}),
        lambda f: edited(f, "added_tokens.json", **{PAD: 320}),
        lambda f: with_pieces(f, 321),
        lambda f: with_pieces(f, 320, **{PAD: 320}),
        lambda f: with_ranks(f, 400),
    ],
)
def test_tokens_without_a_row(
    edit: Callable[[Path], Any], tmp_path: Path, refused: Callable[[Path], None]
) -> None:
    """Each ended the engine where a prompt had it."""
    write_house(tmp_path, block_size=2)
    required(tmp_path)
    edit(tmp_path)
    refused(tmp_path)
    with pytest.raises(CheckpointError, match="remove the tokens"):
        required(tmp_path, "--tokenizer", str(tmp_path))
    required(tmp_path, "--skip-tokenizer-init")
    required(tmp_path, "--tokenizer", str(GOLDENS / "nanogpt_block"))


@pytest.mark.parametrize(
    "edit",
    [
        lambda folder: write_house(folder, block_size=2, vocab=384),  # padded
        lambda folder: with_tokens(folder, "<image_soft_token>"),
        lambda folder: edited(folder, BYTES, pad_token="</s>", max_length=512),
        lambda folder: with_pieces(folder, 317),  # before <s>, </s> and <pad>
        lambda folder: with_ranks(folder, 256),
    ],
)
def test_tokens_with_a_row_each(edit: Callable[[Path], Any], tmp_path: Path) -> None:
    write_house(tmp_path, block_size=2)
    edit(tmp_path)
    required(tmp_path)


@pytest.mark.parametrize("end", [320, [2, 99999], -1])
@pytest.mark.parametrize("file", ["config.json", GENERATION])
def test_an_end_of_text_without_a_logit(
    end: Any, file: str, tmp_path: Path, sentence: Sentence
) -> None:
    write_house(tmp_path, block_size=2)
    edited(tmp_path, file, eos_token_id=end)
    sentence.raises(CheckpointError, required, tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TOKENIZER, POINTER),
        (TOKENIZER, ""),
        (TOKENIZER, '{"model": {"vocab": {"a": 0, "b"'),
        (TOKENIZER, "{}"),
        (TOKENIZER, '{"model": {"vocab": {"a": 0}}, "added_tokens": ["b"]}'),
        (TOKENIZER, "[]"),
        (BYTES, "{"),
        (BYTES, POINTER),
        (GENERATION, ""),
        ("tokenizer.model", ""),
        ("tokenizer.model", POINTER),
        ("tokenizer.model", "\n\x09\n\x07"),
        ("vocab.json", '{"a": "b"}'),
    ],
)
def test_a_damaged_tokenizer(
    name: str, content: str, tmp_path: Path, refused: Callable[[Path], None]
) -> None:
    write_house(tmp_path, block_size=2)
    if name not in (BYTES, GENERATION):
        (tmp_path / TOKENIZER).unlink()
    (tmp_path / name).write_text(content)
    refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 400),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 200),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 2}}, 100),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 25}}, 100),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0, ORIGINAL: 25}}, 100),
    ],
)
def test_the_context_is_vllms(config: dict[str, Any], tokens: int) -> None:
    """By its own function, which later versions have moved."""
    config = {"max_position_embeddings": 100} | config
    assert needs.context(config) == tokens
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from transformers import LlamaConfig
    from vllm.config import model

    rope = config.pop("rope_scaling", None) or config.pop("rope_parameters", {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    hf = LlamaConfig(**config)
    hf.rope_parameters = {"rope_theta": 1e4, **rope, "rope_type": kind}
    derived = config["max_position_embeddings"], "max_position_embeddings"
    arch = SimpleNamespace(derived_max_model_len_and_key=derived)
    judge = {"tokenizer_config": None, "disable_sliding_window": False, "sliding_window": None}
    assert model._get_and_verify_max_len(hf, arch, max_model_len=None, **judge) == tokens
    assert model._get_and_verify_max_len(hf, arch, max_model_len=tokens, **judge) == tokens
    with pytest.raises(ValueError, match="greater than the derived"):
        model._get_and_verify_max_len(hf, arch, max_model_len=tokens + 1, **judge)


def test_a_recurrent_model_need_not_state_a_context_and_has_no_heads() -> None:
    assert needs.context({"hidden_size": 128, "head_dim": 32}) == 2048  # vLLM's warning says it
    assert FAMILIES["mamba2"].head_size({"hidden_size": 128, "head_dim": 32}) is None


@pytest.mark.parametrize("asked", ["513", "1k", "1K", "600"])
def test_more_tokens_than_the_model_has(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    write_house(tmp_path, block_size=2)  # 512
    sentence.raises(SettingError, required, tmp_path, "--max_model_len", asked)
    required(tmp_path, "--max-model-len", asked, "--hf-overrides.max_position_embeddings=9999")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    required(tmp_path, "--max-model-len", asked)


def test_a_context_that_versions_of_vllm_count_otherwise_is_left_to_them(tmp_path: Path) -> None:
    write_house(tmp_path, block_size=2)
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, ORIGINAL: 512}
    edited(tmp_path, "config.json", rope_parameters=rope)
    required(tmp_path, "--max-model-len", "2048")
    with pytest.raises(SettingError, match="a context of 2048 tokens"):
        required(tmp_path, "--max-model-len", "2049")


@pytest.mark.parametrize("asked", ["512", "auto", "-1"])
def test_what_vllm_takes_or_refuses_by_itself(asked: str, tmp_path: Path) -> None:
    write_house(tmp_path, block_size=2)
    required(tmp_path, "--max-model-len", asked)


@pytest.fixture
def without_compiler(on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ["--enforce-eager"],
        ["--no-enforce-eager", "--enforce_eager"],
        ["-O0"],
        ["--compilation-config.mode=0"],
    ],
)
def test_only_a_compiled_start_needs_a_compiler(
    words: list[str],
    without_compiler: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sentence: Sentence,
) -> None:
    compiler.require(of_server(words))
    for others in ([], ["--enforce-eager", "--no-enforce-eager"], ["--dtype", "float32"]):
        sentence.raises(SettingError, compiler.require, of_server(others))
    monkeypatch.setenv("CXX", "clang++")
    sentence.raises(SettingError, compiler.require, of_server([]))
    (tmp_path / "clang++").touch(0o755)
    compiler.require(of_server([]))


def test_serve_asks_for_a_compiler_before_the_start(
    without_compiler: None, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "run_server", None)
    assert cli.main(["serve", str(DEMO)]) == 2
    assert "install the package g++ (gcc-c++ on Fedora)" in capfd.readouterr().err


@pytest.mark.parametrize("base", ["llama", "qwen3_moe", "mamba2"])
def test_a_plain_model_is_told_how_to_become_another(
    base: str, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a command that does it, as it is written."""
    monkeypatch.chdir(tmp_path)
    write_standard("a model", base)
    assert cli.main(["check", "a model"]) == 1
    advice = capfd.readouterr().err.rsplit("`", 2)[1]
    assert advice.startswith("attnres-serve convert 'a model' DST --add-zero-queries")
    import shlex

    assert cli.main(shlex.split(advice)[1:]) == 0
    assert cli.main(["check", "DST"]) == 0
    assert capfd.readouterr().out.endswith("\nServe it: attnres-serve serve DST\n")


def test_another_model_is_not(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "convert" not in capfd.readouterr().err


def test_check_says_it_with_the_facts(
    without_tokenizer: Path, capfd: pytest.CaptureFixture
) -> None:
    assert cli.main(["check", str(without_tokenizer)]) == 1
    out, err = capfd.readouterr()
    assert err.startswith("attnres-serve: ") and "has no tokenizer" in err and err.count("\n") == 1
    assert "tokenizer     none" in out and "context       512 tokens" in out
    assert cli.main(["serve", str(without_tokenizer)]) == 2
    assert capfd.readouterr().err == err
    assert cli.main(["check", "--json", str(without_tokenizer)]) == 1
    facts = json.loads(capfd.readouterr().out)
    assert (facts["served"], facts["tokenizer"], facts["chat_template"]) == (False, None, False)
    assert (facts["context"], facts["vocabulary"], facts["head_size"]) == (512, 320, 32)


@pytest.mark.parametrize("flags", [["--attnres-backend", "triton"], ["--max-model-len", "4096"]])
def test_a_refusal_costs_no_start(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    status, err, seconds = command("serve", DEMO, *flags)
    assert status == 2
    sentence.check(err)
    assert seconds < of_a_start()


def test_quantised_experts_without_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    base = write_house(tmp_path / "float", "qwen3_moe", layers=2, block_size=2)
    layers = linear_layers(load_file(base / "model.safetensors"), without="shared_expert_gate")
    result = check_folder(quantised(tmp_path / "int8", base, layers=layers)).index
    monkeypatch.setattr(source, "lacks_int8", lambda: False)
    monkeypatch.setattr(source, "lacks_quantized_experts", lambda: False)
    needs.check_quantized("m", result)
    monkeypatch.setattr(source, "lacks_quantized_experts", lambda: True)
    needs.check_quantized("m", check_folder(base).index)
    needs.check_quantized("m", None)
    sentence.raises(CheckpointError, needs.check_quantized, "m", result)
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    needs.check_quantized("m", result)


@pytest.mark.parametrize(
    ("reported", "lacks"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 fma avx512f\n", True),
        ("processor\t: 0\nflags\t\t: avx2 avx_vnni\n", False),
        ("processor\t: 0\nflags\t\t: avx512f avx512_vnni\n", False),
        ("processor\t: 0\nflags\t\t: amx_tile amx_int8\n", False),
        ("processor\t: 0\nFeatures\t: asimd\n", False),  # not of x86
    ],
)
def test_int8_without_dot_products(
    reported: str, lacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    """vLLM's products are wrong there, without a word."""
    base = write_house(tmp_path / "float", "qwen2", block_size=2)
    result = check_folder(quantised(tmp_path / "int8", base)).index
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(reported)
    monkeypatch.setattr(source, "CPUINFO", cpuinfo)
    needs.check_quantized("m", check_folder(base).index)
    if not lacks:
        return needs.check_quantized("m", result)
    sentence.raises(CheckpointError, needs.check_quantized, "m", result)
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    needs.check_quantized("m", result)


def test_a_quantised_layer_that_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    base = write_house(tmp_path / "float", "deepseek_v3", layers=2, block_size=2)
    layers = linear_layers(load_file(base / "model.safetensors"), without=r"\.experts\.")
    result = check_folder(quantised(tmp_path / "int8", base, layers=layers)).index
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    needs.check_quantized("m", result)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    needs.check_quantized("m", check_folder(base).index)
    sentence.raises(CheckpointError, needs.check_quantized, "m", result)


def test_which_cpus_compute_quantised_experts() -> None:
    """As vLLM's kernels say themselves."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUExpertsInt8,
        ZenCPUExpertsInt8,
    )

    kernels = (CPUExpertsInt8, ZenCPUExpertsInt8)
    runs = any(kernel._supports_current_device() for kernel in kernels)
    assert source.lacks_quantized_experts() == (not runs)


@pytest.mark.parametrize("token", ["a\u2028b", "c\x85", "\x0c", "\x1cd"])
def test_only_line_breaks_part_the_tokens_of_a_vocabulary(tmp_path, token):
    lines = ["[PAD]", token, "e"]
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert token_ids.read(tmp_path) == {one: number for number, one in enumerate(lines)}
    token_ids.check(tmp_path, len(lines))
