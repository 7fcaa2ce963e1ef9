"""Kimi's tokenizer against tiktoken, which Kimi's own class calls, with Kimi's pattern."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
from checkpoints.tiktoken_files import BYTES, HAN, SPECIAL, write_kimi, write_ranks
from on_file import Sentence
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from attnres_serve.checkpoints import kimi_tokenizer, tokenizer
from attnres_serve.errors import CheckpointError

# As ten public readers of Kimi's files have it, in one piece.
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (
    *("the", "I'll", "WE'RE", "don't", "it'S", "'tis", "HTTPServer", "naïve", "\u017ftraße"),
    *("ǅ", "İ", "中文", "模型在混合", "北京a", "a北", "〇〇七", "々", "㐀", "𠀀字"),
    *("ひらがな", "カタ漢字", "한국어"),
    *("0", "12345678901", "٣٤٥", "Ⅷ", "½", "\uff11\uff12\uff13", "3.14159", "0x1F"),
    *("def f(x):\n    return x**2\n", "\tif (a&&b){\r\n", "// --->", "<|im_end", "\\d+"),
    "#!/bin/sh",
    *("😀😀", "👩\u200d💻", "🇨🇳", "e\u0301\u0302", "אֲנִי", "مَرْحَبًا", "हिन्दी", "ไทย"),
    *(" ", "  ", "\n", "\n\n\n", "\r\n", "\t\t", "\u00a0", "\u3000", "\u2028", "   \n  ", "===="),
)


def a_text(seed: int, letters: int) -> str:
    """Words of every kind, of which some touch."""
    chosen = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < letters:
        parts += [chosen.choice(WORDS), chosen.choice(("", "", " ", "  ", "\n"))]
    return "".join(parts)


def splitter(pattern: str) -> pre_tokenizers.Sequence:
    """Cuts texts by a pattern, and letters into bytes."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, into_bytes])


@pytest.fixture(scope="module")
def trained() -> list[bytes]:
    """1500 tokens as a model's would be: merges of other texts of the same words."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = splitter(PATTERN)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    own.train_from_iterator([a_text(seed, 4000) for seed in range(1, 6)], trainer)
    byte_of = {sign: byte for byte, sign in enumerate(kimi_tokenizer._byte_characters())}
    in_order = sorted(own.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[sign] for sign in token) for token, _ in in_order]
    return [*BYTES, *(token for token in tokens if len(token) > 1)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnres_serve" / "tokenizers"


def judge(tokens: list[bytes]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def test_ten_thousand_letters(trained: list[bytes], tmp_path: Path) -> None:
    """Every token, and the text again.  GPT-4's pattern has others."""
    own, other = tokenizer.load(write_kimi(tmp_path / "m", trained)), judge(trained)
    text = a_text(seed=0, letters=10_000)
    ids = own(text).input_ids
    assert ids == other.encode_ordinary(text)
    assert own.decode(ids) == text
    assert max(map(len, (trained[one] for one in ids))) > 3  # merges are tried
    read = own.backend_tokenizer
    read.pre_tokenizer = splitter(gpt_4_pattern())
    assert read.encode(text).ids != ids


def gpt_4_pattern() -> str:
    """That with which transformers reads ranks whose class it does not know."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return str(TikTokenConverter().pattern)


def test_letters_of_every_kind(trained: list[bytes], tmp_path: Path) -> None:
    """Parts of texts that begin and end anywhere, and runs of one sign."""
    own, other = tokenizer.load(write_kimi(tmp_path / "m", trained)), judge(trained)
    text, chosen = a_text(seed=7, letters=5_000), random.Random(7)
    begins = [chosen.randrange(len(text)) for _ in range(1500)]
    texts = [text[begin : begin + chosen.randrange(1, 30)] for begin in begins]
    texts += [
        sign * count for sign in (" ", "=", "a", "中", "\n", "ab", "0", "😀") for count in range(90)
    ]
    assert own(texts).input_ids == other.encode_ordinary_batch(texts)


@pytest.mark.exhaustive
def test_classes_of_letters() -> None:
    """Oniguruma and tiktoken's Rust take the same signs of Unicode for Han, letters and blanks."""
    signs = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x30000))))
    ranks = {one: byte for byte, one in enumerate(BYTES)}
    upper, lower = kimi_tokenizer._UPPER, kimi_tokenizer._LOWER
    for kind in (r"[\p{Han}]", upper, lower, r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s"):
        split = pre_tokenizers.Split(Regex(kind), "removed").pre_tokenize_str(signs)
        rest = {sign for part, _ in split for sign in part}
        rust = tiktoken.Encoding(kind, pat_str=kind, mergeable_ranks=ranks, special_tokens={})
        taken = bytes(rust.encode_ordinary(signs)).decode()
        assert {*signs} - rest == {*taken}, kind


def test_special_tokens(tmp_path: Path) -> None:
    """Named ones have their ids, and those between them and behind are reserved."""
    tokens = [*BYTES, b"ab"]
    named = {257: "[BOS]", 258: "[EOS]", 261: "<|im_end|>", 270: "[PAD]"}
    folder = write_kimi(
        tmp_path / "m",
        tokens,
        added_tokens_decoder={
            str(number): {"content": name} | SPECIAL | {"special": name != "<|im_end|>"}
            for number, name in named.items()
        },
        pad_token="[PAD]",
        additional_special_tokens=["<|im_end|>"],
    )
    own = tokenizer.load(folder)
    assert len(own) == 257 + 256
    assert [own.bos_token_id, own.eos_token_id, own.pad_token_id] == [257, 258, 270]
    for number, name in named.items() | {
        (260, "<|reserved_token_260|>"),
        (512, "<|reserved_token_512|>"),
    }:
        assert own.convert_tokens_to_ids(name) == number
        assert own.encode(f"ab{name}ab") == [256, number, 256]
        assert own.decode([256, number]) == f"ab{name}"
    assert own.decode([256, 258, 260, 261], skip_special_tokens=True) in ("ab", "ab<|im_end|>")
    assert own.encode("<|reserved_token_513|>")[0] == ord("<")
    few = tokenizer.readable(folder, rows=300)
    content = json.loads((few / "tokenizer.json").read_text())
    assert max(one["id"] for one in content["added_tokens"]) == 299


def test_the_chat_template(tmp_path: Path) -> None:
    """That of a file goes before that of tokenizer_config.json, and named ones are kept."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}[EOS]{% endfor %}"
    folder = write_kimi(tmp_path / "m", chat_template=template)
    message = [{"role": "user", "content": "中a"}]
    written = tokenizer.load(folder).apply_chat_template(message, tokenize=False)
    assert written == "<user>中a[EOS]"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    own = tokenizer.load(folder)
    assert own.apply_chat_template(message, tokenize=False) == "中a!"
    assert own.apply_chat_template(message, chat_template="tools", tokenize=False) == "tools"


@pytest.mark.parametrize("pieces", [[257, 97], [256, 173, 97], [*HAN, 97], [97, 256]])
def test_parts_of_a_letter_in_a_stream(pieces: list[int], tmp_path: Path) -> None:
    """vLLM tells a letter when its last byte has come, whatever tokens it came in."""
    from vllm import SamplingParams
    from vllm.tokenizers import get_tokenizer
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    own = get_tokenizer(str(tokenizer.readable(write_kimi(tmp_path / "m"), rows=320)))
    tokens: list[bytes] = [*BYTES, HAN[:2], HAN, HAN + b"a"]
    request: Any = SimpleNamespace(
        request_id="r", prompt_token_ids=[98], sampling_params=SamplingParams(), prompt_embeds=None
    )
    stream = IncrementalDetokenizer.from_new_request(own, request)
    reported, seen = "", b""
    for piece in pieces:
        stream.update([piece], False)
        reported += stream.get_next_output_text(False, True)
        seen += tokens[piece]
        assert reported == seen.decode(errors="ignore")
    assert own.decode(pieces) == seen.decode(errors="replace")


def test_a_copy_is_made_once(cache: Path, tmp_path: Path) -> None:
    """And anew for other files, beside the first."""
    folder = write_kimi(tmp_path / "m")
    first = tokenizer.readable(folder, 320)
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer.readable(folder, 320) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    write_kimi(tmp_path / "same")
    assert tokenizer.readable(tmp_path / "same", 320) == first
    write_kimi(folder, special=("[BOS]", "[EOS]", "<|im_end|>"))
    second = tokenizer.readable(folder, 320)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    third = tokenizer.readable(folder, 320)
    assert {*cache.iterdir()} == {first, second, third} and len({first, second, third}) == 3


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"no place for the copy .*; set XDG_CACHE_HOME"):
        tokenizer.readable(write_kimi(tmp_path / "m"))


@pytest.mark.parametrize(
    "damage", [b"", b"YQ== 1\n", b"YQ== 0\nYQ== 1\n", b"YQ= 0\n", b"YQ==\n", b"YQ== x\n"]
)
def test_damaged_ranks(damage: bytes, tmp_path: Path, sentence: Sentence) -> None:
    folder = write_kimi(tmp_path / "m")
    (folder / "tiktoken.model").write_bytes(damage)
    sentence.raises(CheckpointError, tokenizer.readable, folder)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": None},
        {"added_tokens_decoder": {}},
        {"added_tokens_decoder": {"258": {"content": "[BOS]"}}},
        {"added_tokens_decoder": {"259": {"content": "a"}, "260": {"content": "a"}}},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": ["[BOS]"]},
        {"pad_token": "[PAD]"},
        {"eos_token": {"content": "</s>"}},
    ],
    ids=str,
)
def test_special_tokens_that_are_not_stated(
    config: dict[str, Any], tmp_path: Path, sentence: Sentence
) -> None:
    sentence.raises(CheckpointError, tokenizer.readable, write_kimi(tmp_path / "m", **config))


def test_ranks_may_lack_a_last_line_break(tmp_path: Path) -> None:
    folder = write_kimi(tmp_path / "m")
    write_ranks(folder / "tiktoken.model", [*BYTES, HAN[:2], HAN, HAN + b"a"])
    content = (folder / "tiktoken.model").read_bytes()
    (folder / "tiktoken.model").write_bytes(content.rstrip(b"\n"))
    assert tokenizer.load(folder)("中a").input_ids == [257, 97]
