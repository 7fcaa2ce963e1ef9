"""Kimi's tokenizer: tiktoken ranks with a pattern that only the checkpoint's code states.

It is translated to a tokenizer.json, which transformers and vLLM read without that code.
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

RANKS, CONFIG = "tiktoken.model", "tokenizer_config.json"
MODULE, CLASS = "tokenization_kimi", "TikTokenTokenizer"
RESERVED = 256  # special ids after the ranks
# Han characters are split from other letters.  Python's `re` does not support `&&`, Oniguruma does.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
ALTERNATIVES = (
    r"[\p{Han}]+",
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_BEHIND}",
    f"{_BEFORE}{_UPPER}+{_LOWER}*{_BEHIND}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERN = "|".join(ALTERNATIVES)
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
DEFAULTS = {"bos_token": "[BOS]", "eos_token": "[EOS]"}  # of Kimi's class
_LINE = re.compile(rb"(\S+) (\d+)")


def is_read_by(name: str, code: str | None) -> bool:
    """Whether a class is certainly Kimi's.

    Args:
        name: its reference in ``auto_map``.
        code: the source of its module; None or empty if not available.
    """
    module, _, cls = name.rpartition("--")[2].rpartition(".")
    if cls != CLASS:
        return False
    patterns = _patterns(code or "")
    if not patterns:
        return module == MODULE
    parts = {PATTERN, *ALTERNATIVES}
    return patterns <= parts and (PATTERN in patterns or patterns >= {*ALTERNATIVES[:5]})


def _patterns(code: str) -> set[str]:
    """The string constants of a source that are patterns of letters."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError):
        return {code}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and r"\p{" in value}


def ranks(folder: Path) -> dict[bytes, int]:
    """The ids, 0 to n - 1, of the tokens of tiktoken.model, by their bytes.

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / RANKS
    refuse_pointer(path)
    token_ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1] if match else b"", validate=True)
        except binascii.Error:
            token = b""
        if match is None or not token or int(match[2]) != number or token in token_ranks:
            raise CheckpointError(
                f"line {number + 1} of {path} is {line[:40]!r}; expected another token in base64, "
                f"a blank and its rank {number}: copy or download the file again."
            )
        token_ranks[token] = number
    if missing := [byte for byte in range(256) if bytes([byte]) not in token_ranks]:
        raise CheckpointError(
            f"{path} has no token for the byte {missing[0]}, so it is damaged; copy or download "
            "the file again."
        )
    return token_ranks


def special_tokens(folder: Path, first: int, rows: int | None) -> list[dict[str, Any]]:
    """The tokens after the ranks, in the order of their ids.

    Args:
        folder: the folder of tokenizer_config.json.
        first: the first id, which is the number of ranks.
        rows: of the embedding.  Reserved tokens beyond them are left out.

    Raises:
        CheckpointError: they are not stated.
    """
    path = folder / CONFIG
    stated: Any = read_object(path).get("added_tokens_decoder")
    try:
        tokens = {int(number): {**token} for number, token in stated.items()}
        names = {number: token["content"] for number, token in tokens.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        tokens = names = {}
    if not names or min(names) < first or len({*names.values()}) < len(names):
        raise CheckpointError(
            f"added_tokens_decoder of {path} does not state Kimi's special tokens; expected an "
            f"object of ids from {first} on, behind the ranks of {RANKS}, each with its own "
            "`content`: copy the file of the model's."
        )
    last = first + RESERVED if rows is None else min(first + RESERVED, rows)
    reserved = {"special": True, "normalized": False}
    return [
        tokens.get(number, reserved | {"content": f"<|reserved_token_{number}|>"})
        for number in range(first, max(last, max(tokens) + 1))
    ]


def config(folder: Path, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokenizer_config.json of the translation.

    Args:
        folder: the folder of Kimi's file.
        tokens: the tokens after the ranks.

    Raises:
        CheckpointError: it names an unknown token.
    """
    path = folder / CONFIG
    known = {token["content"] for token in tokens}
    content = {key: token for key, token in DEFAULTS.items() if token in known}
    content |= read_object(path)
    for key in NAMED:
        token = content.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and name not in known:
            raise CheckpointError(
                f"{key} of {path} is {name!r}, which its added_tokens_decoder lacks; name one of "
                "those tokens."
            )
    return content


def backend(ranks: dict[bytes, int], tokens: list[dict[str, Any]]) -> "Tokenizer":
    """A tokenizer that splits texts like tiktoken with these ranks and Kimi's pattern.

    Args:
        ranks: the tokens as bytes, with their ids.
        tokens: the tokens after the ranks, as arguments of ``AddedToken``.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    signs = _signs()
    texts = {token: "".join(map(signs.__getitem__, token)) for token in ranks}
    merges = [
        (texts[token[:cut]], texts[token[cut:]])
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(**{"normalized": False, **token}) for token in tokens])
    return tokenizer


def _signs() -> list[str]:
    """The character for each byte in a byte-level vocabulary, as in GPT-2."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte if byte in printed else 256 + others.index(byte)) for byte in range(256)]
