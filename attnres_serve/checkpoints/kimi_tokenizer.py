"""Kimi's tokenizer: tiktoken ranks with a pattern that only the checkpoint's code states.

This module translates it to a tokenizer.json, which transformers and vLLM read without that code.
"""

import ast
import base64
import binascii
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres_serve.checkpoints.files import read_object, refuse_pointer
from attnres_serve.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RANKS_FILE, CONFIG_FILE = "tiktoken.model", "tokenizer_config.json"
KIMI_MODULE, KIMI_CLASS = "tokenization_kimi", "TikTokenTokenizer"
RESERVED_IDS = 256  # ids of special tokens after the ranks
# Han characters are split from other letters.  `&&` is supported by the regular expressions of
# Oniguruma, which tokenizers uses, and not by Python's `re`.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SIGN_BEFORE, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
ALTERNATIVES = (
    r"[\p{Han}]+",
    f"{_SIGN_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
    f"{_SIGN_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERN = "|".join(ALTERNATIVES)
# Keys of tokenizer_config.json that name a special token, and those that Kimi's class assumes.
TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
DEFAULT_TOKENS = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
_RANKS_LINE = re.compile(rb"(\S+) (\d+)")


def is_kimi_class(reference: str, source: str | None) -> bool:
    """Whether a tokenizer class is without doubt Kimi's.

    Args:
        reference: the class in ``auto_map``, such as ``owner/name--module.Class``.
        source: the source code of its module; None or empty if not available.
    """
    module, _, class_name = reference.rpartition("--")[2].rpartition(".")
    if class_name != KIMI_CLASS:
        return False
    patterns = _letter_patterns(source or "")
    if not patterns:
        return module == KIMI_MODULE
    kimi_patterns = {PATTERN, *ALTERNATIVES}
    return patterns <= kimi_patterns and (PATTERN in patterns or patterns >= {*ALTERNATIVES[:5]})


def _letter_patterns(source: str) -> set[str]:
    """The string constants of a source code that are regular expressions with classes of letters.

    The whole text, which is none of Kimi's patterns, stands for a source that is no Python.
    """
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError):
        return {source}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and r"\p{" in value}


def ranks(folder: Path) -> dict[bytes, int]:
    """The ids, 0 to n - 1, of the tokens of tiktoken.model, by their bytes.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / RANKS_FILE
    refuse_pointer(path)
    token_ranks: dict[bytes, int] = {}
    for rank, line in enumerate(path.read_bytes().splitlines()):
        match = _RANKS_LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1] if match else b"", validate=True)
        except binascii.Error:
            token = b""
        if match is None or not token or int(match[2]) != rank or token in token_ranks:
            raise CheckpointError(
                f"line {rank + 1} of {path} is {line[:40]!r}; expected another token in base64, "
                f"a blank and its rank {rank}: copy or download the file again."
            )
        token_ranks[token] = rank
    if missing_bytes := [byte for byte in range(256) if bytes([byte]) not in token_ranks]:
        raise CheckpointError(
            f"{path} has no token for the byte {missing_bytes[0]}, so it is damaged; copy or "
            "download the file again."
        )
    return token_ranks


def special_tokens(folder: Path, first_id: int, embedding_rows: int | None) -> list[dict[str, Any]]:
    """The tokens after the ranks, in the order of their ids.

    Args:
        folder: the folder of tokenizer_config.json.
        first_id: the first id, which is the number of ranks.
        embedding_rows: reserved tokens without such a row are left out; None if unknown.

    Raises:
        CheckpointError: the file does not state Kimi's special tokens.
    """
    path = folder / CONFIG_FILE
    stated_tokens: Any = read_object(path).get("added_tokens_decoder")
    try:
        tokens = {int(token_id): {**token} for token_id, token in stated_tokens.items()}
        names = {token_id: token["content"] for token_id, token in tokens.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        tokens = names = {}
    if not names or min(names) < first_id or len({*names.values()}) < len(names):
        raise CheckpointError(
            f"added_tokens_decoder of {path} does not state Kimi's special tokens; expected an "
            f"object of ids from {first_id} on, behind the ranks of {RANKS_FILE}, each with its "
            "own `content`: copy the file of the model's."
        )
    end = first_id + RESERVED_IDS
    if embedding_rows is not None:
        end = min(end, embedding_rows)
    reserved = {"special": True, "normalized": False}
    return [
        tokens.get(token_id, reserved | {"content": f"<|reserved_token_{token_id}|>"})
        for token_id in range(first_id, max(end, max(tokens) + 1))
    ]


def translated_config(folder: Path, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokenizer_config.json that belongs to the translated tokenizer.json.

    Args:
        folder: the folder of Kimi's tokenizer_config.json.
        tokens: the tokens after the ranks.

    Raises:
        CheckpointError: Kimi's file names a token that is none of these.
    """
    path = folder / CONFIG_FILE
    token_names = {token["content"] for token in tokens}
    config = {key: token for key, token in DEFAULT_TOKENS.items() if token in token_names}
    config |= read_object(path)
    for key in TOKEN_KEYS:
        token = config.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and name not in token_names:
            raise CheckpointError(
                f"{key} of {path} is {name!r}, which its added_tokens_decoder lacks; name one of "
                "those tokens."
            )
    return config


def fast_tokenizer(ranks: dict[bytes, int], tokens: list[dict[str, Any]]) -> "Tokenizer":
    """A tokenizer that splits texts like tiktoken with these ranks and Kimi's pattern.

    Args:
        ranks: the tokens as bytes, with their ids.
        tokens: the tokens after the ranks, as arguments of ``AddedToken``.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    byte_characters = _byte_characters()
    texts = {token: "".join(map(byte_characters.__getitem__, token)) for token in ranks}
    merges = [
        (texts[token[:cut]], texts[token[cut:]])
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split_by_pattern = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    to_byte_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_by_pattern, to_byte_characters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(**{"normalized": False, **token}) for token in tokens])
    return tokenizer


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, as in GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte if byte in printable else 256 + unprintable.index(byte)) for byte in range(256)
    ]
