"""Tokenizers whose class is code of the checkpoint's: read exactly, or refused in a sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub as hub_of_tests
import pytest
from checkpoints.fla import write_fla
from checkpoints.house import write_house
from checkpoints.tensors import TOKENIZER_SOURCE
from checkpoints.tiktoken_files import BYTES, CODE, state, write_kimi, write_ranks
from on_file import Sentence

from attnres_serve import cli
from attnres_serve.checkpoints import hub, kimi_tokenizer, needs, tokenizer, tokenizer_class
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.checkpoints.tokenizer_class import Way, reading
from attnres_serve.compat import source
from attnres_serve.compat.arguments import of_server
from attnres_serve.errors import CheckpointError

MOONSHOT = "tokenization_moonshot.TikTokenTokenizer"
KIMI = "tokenization_kimi.TikTokenTokenizer"
PARTS = f"class TikTokenTokenizer:\n    pat_str = '|'.join({list(kimi_tokenizer.ALTERNATIVES)!r})\n"
WHOLE = f"PATTERN = {kimi_tokenizer.PATTERN!r}\n"
QWEN_CODE = r"""PAT_STR = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
"""
OTHER_CODE = PARTS.replace("{1,3}", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_house(tmp_path / "m", block_size=2)


def ranks(name: str) -> Callable[[Path], None]:
    return lambda folder: write_ranks(folder / name, BYTES)


def pieces(folder: Path) -> None:
    """A vocabulary of SentencePiece's, as its file begins."""
    text = b"\x0a\x03\x0a\x01a"
    (folder / "tokenizer.model").write_bytes(text * 3)


Foreign = tuple[Callable[[Path], None], Any, str, str]


def auto(
    name: str, write: Callable[[Path], None], code: str = CODE, cls: str | None = None
) -> Foreign:
    """A class that auto_map names, and tokenizer_class too unless that is another one."""
    own = name.rpartition(".")[2] if cls is None else cls
    return write, {"AutoTokenizer": [name, None]}, own, code


FOREIGN: dict[str, Foreign] = {
    "qwen": auto("q.QWenTokenizer", ranks("qwen.tiktoken"), QWEN_CODE),
    "chatglm": auto("tokenization_chatglm.ChatGLMTokenizer", pieces),
    "glm4": auto("tokenization_chatglm.ChatGLM4Tokenizer", ranks("tokenizer.model")),
    "internlm": (pieces, ["tokenization_internlm.InternLMTokenizer", None], "", CODE),
    "internlm2": (
        pieces,
        {"AutoTokenizer": ["a.InternLM2Tokenizer", "b_fast.InternLM2TokenizerFast"]},
        "InternLM2Tokenizer",
        CODE,
    ),
    "baichuan": auto("tokenization_baichuan.BaichuanTokenizer", pieces),
    "a name of transformers'": auto("tokenization_own.LlamaTokenizer", pieces),
    "of another repository": auto("lab/model--tokenization_x.XTokenizer", pieces, cls="X"),
    "ranks of another pattern": auto(KIMI, ranks("tiktoken.model"), OTHER_CODE),
    "ranks of Qwen's pattern": auto(KIMI, ranks("tiktoken.model"), QWEN_CODE),
    "code that cannot be read": auto(KIMI, ranks("tiktoken.model"), "def ("),
    "Moonshot without code": auto(MOONSHOT, ranks("tiktoken.model"), ""),
    "Kimi without ranks": auto(KIMI, pieces),
    "Kimi Audio": auto("t.KimiAudioTokenizer", ranks("tiktoken.model"), cls=""),
    "by its name alone": (pieces, None, "BaichuanTokenizer", CODE),
    "Kimi's name alone": (ranks("tiktoken.model"), None, "TikTokenTokenizer", CODE),
}


def foreign(folder: Path, kind: str) -> str:
    """Have a tokenizer of a kind that is refused; returns the name of its class."""
    write, auto_map, cls, code = FOREIGN[kind]
    write(folder)
    listed = auto_map["AutoTokenizer"] if isinstance(auto_map, dict) else auto_map or [cls]
    name = [one for one in listed if one][-1]
    module = name.rpartition(".")[0]
    sources = {module: code} if code and module and "--" not in module else {}
    config = {"tokenizer_class": cls} if cls else {}
    state(folder, auto_map, sources, **config)
    return str(name)


@pytest.mark.parametrize("kind", FOREIGN)
def test_classes_of_a_checkpoint(
    kind: str, folder: Path, capfd: pytest.CaptureFixture, sentence: Sentence
) -> None:
    """Refused with the class and the ways out, by every command that reads a text."""
    foreign(folder, kind)
    parsed = check_folder(folder).translated("m")
    message = sentence.raises(CheckpointError, needs.check, "m", parsed, folder)
    for command in ("check", "serve"):
        assert cli.main([command, str(folder)]) == (1 if command == "check" else 2)
        assert capfd.readouterr().err == f"attnres-serve: {message}\n"
    with pytest.raises(CheckpointError, match="whose code is not run"):
        tokenizer.load(folder)
    needs.check("m", parsed, folder, of_server(["--skip-tokenizer-init"]))
    needs.check("m", parsed, folder, of_server(["--tokenizer", str(TOKENIZER_SOURCE)]))
    needs.check("m", parsed, folder, of_server(["--tokenizer-mode", "mistral"]))
    with pytest.raises(CheckpointError, match="whose code is not run"):
        needs.check("m", parsed, TOKENIZER_SOURCE, of_server(["--tokenizer", str(folder)]))
    for mode in source.TOKENIZER_MODES:
        with pytest.raises(CheckpointError, match="whose code is not run"):
            needs.check("m", parsed, folder, of_server([f"--tokenizer-mode={mode}"]))


@pytest.mark.parametrize("kind", FOREIGN)
def test_code_that_may_run(kind: str, folder: Path) -> None:
    """The way out is told and open where the code is at hand, and only there."""
    foreign(folder, kind)
    has_code = "name alone" not in kind and kind not in ("Moonshot without code",)
    with pytest.raises(CheckpointError) as raised:
        reading(folder)
    assert ("--trust-remote-code" in str(raised.value)) == has_code
    parsed = check_folder(folder).translated("m")
    if not has_code:
        with pytest.raises(CheckpointError, match="whose code is not run"):
            needs.check("m", parsed, folder, of_server(["--trust-remote-code"]))
        return
    assert reading(folder, runs_code=True).way is Way.OWN_CODE
    assert tokenizer.readable(folder, runs_code=True) == folder
    needs.check("m", parsed, folder, of_server(["--trust_remote_code"]))


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_way_out_by_a_file(kind: str, folder: Path) -> None:
    """A tokenizer.json is read as it is, whatever the class beside it."""
    name = foreign(folder, kind)
    shutil.copy(TOKENIZER_SOURCE / "tokenizer.json", folder)
    actual = reading(folder)
    assert actual.way is (Way.AS_IT_IS if "alone" in kind else Way.FAST_FILE)
    assert "alone" in kind or f"without {name} of auto_map of tokenizer_config.json" in actual.why
    text = "def f(中a):\n    return '\\n' # don't"
    expected = tokenizer.load(TOKENIZER_SOURCE)(text).input_ids
    assert tokenizer.load(folder)(text).input_ids == expected
    needs.check("m", check_folder(folder).translated("m"), folder)


@pytest.mark.parametrize(
    ("code", "module"),
    [
        (CODE, "tokenization_kimi"),
        (None, "tokenization_kimi"),
        (PARTS, "tokenization_kimi"),
        (WHOLE, "tokenization_kimi"),
        (PARTS, "tokenization_moonshot"),
        (WHOLE, "tokenization_moonshot"),
    ],
)
def test_kimis_class(
    code: str | None, module: str, folder: Path, capfd: pytest.CaptureFixture
) -> None:
    """By its name, or by the pattern in its code, which is not run."""
    name = f"{module}.TikTokenTokenizer"
    write_kimi(folder, code=code, module=module)
    assert tokenizer.load(folder)("中a").input_ids == [257, 97]
    assert cli.main(["check", str(folder)]) == 0
    line = (
        f"tiktoken.model, with Kimi's pattern, because auto_map of tokenizer_config.json has {name}"
    )
    assert line in capfd.readouterr().out
    assert cli.main(["check", "--json", str(folder)]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["tokenizer"], facts["tokenizer_read"]) == tuple(line.split(", ", 1))
    way = Way.KIMI if code is None else Way.OWN_CODE
    assert reading(folder, runs_code=True).way is way


@pytest.mark.parametrize("ranks_too", [True, False])
def test_a_file_that_transformers_made_of_kimis_ranks(
    ranks_too: bool, folder: Path, sentence: Sentence
) -> None:
    """``save_pretrained`` after a silent reading with GPT-4's pattern."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    write_kimi(folder)
    made = TikTokenConverter(str(folder / "tiktoken.model"), extra_special_tokens=["[BOS]"])
    made.converted().save(str(folder / "tokenizer.json"))
    if not ranks_too:
        (folder / "tiktoken.model").unlink()
    sentence.raises(CheckpointError, tokenizer.readable, folder)
    right = tokenizer.readable(write_kimi(folder.parent / "right"))
    shutil.copy(right / "tokenizer.json", folder)
    assert tokenizer.load(folder)("中a").input_ids == [257, 97]


def test_an_auto_map_of_the_model(folder: Path, sentence: Sentence) -> None:
    """One of config.json counts too, and one without a tokenizer does not."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"auto_map": {"AutoModelForCausalLM": "modeling.X"}}))
    assert reading(folder) == (Way.AS_IT_IS, "")
    path.write_text(json.dumps(content | {"auto_map": {"AutoTokenizer": ["tok.X", None]}}))
    assert reading(folder).way is Way.FAST_FILE
    (folder / "tokenizer.json").unlink()
    pieces(folder)
    sentence.raises(CheckpointError, reading, folder)


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "PreTrainedTokenizerFast"}, None])
def test_ranks_without_a_class(
    name: str, config: dict[str, str] | None, folder: Path, sentence: Sentence
) -> None:
    """They state no pattern."""
    state(folder, None, **(config or {}))
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    ranks(name)(folder)
    sentence.raises(CheckpointError, reading, folder)


@pytest.mark.parametrize("cls", ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2TokenizerFast", ""])
def test_classes_of_transformers(cls: str, folder: Path) -> None:
    state(folder, None, **({"tokenizer_class": cls} if cls else {}))
    pieces(folder)
    message = f"by transformers' {cls}, which tokenizer_class of tokenizer_config.json names"
    assert reading(folder) == (Way.AS_IT_IS, message if cls else "")
    assert tokenizer.readable(folder) == folder


def test_a_class_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers itself is asked then."""
    assert tokenizer_class._is_known("HerbertTokenizerFast")
    assert not tokenizer_class._is_known("QWenTokenizer")


def test_files_of_a_model_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they are in the cache; code of the tokenizer's is among them, unread."""
    write_kimi(tmp_path / "m")
    snapshot = hub_of_tests.cached(tmp_path / "hub", tmp_path / "m")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = hub.tokenizer_folder(hub_of_tests.MODEL)
    assert result == snapshot and result is not None
    assert reading(result).way is Way.KIMI
    assert tokenizer.load(result)("中a").input_ids == [257, 97]
    assert hub.tokenizer_folder("someone/else") is None
    assert hub.tokenizer_folder(str(tmp_path / "m" / "tiktoken.model")) is None
    kinds = [kind for kind in hub.TOKENIZER if Path("tokenization_kimi.py").match(kind)]
    assert kinds == ["token*"]


def test_a_converted_checkpoint(tmp_path: Path) -> None:
    """It is read as its source is, because the code that tells the pattern goes with it."""
    source = write_kimi(write_fla(tmp_path / "source"), code=PARTS, module="tokenization_moonshot")
    convert(str(source), str(tmp_path / "target"), to_house=True)
    assert reading(tmp_path / "target") == reading(source)
    assert tokenizer.load(tmp_path / "target")("中a").input_ids == [257, 97]
