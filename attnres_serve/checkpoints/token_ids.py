"""Checks of a tokenizer's ids, read from its files, against the rows of the embedding.

vLLM accepts ids up to the larger vocabulary of tokenizer and model, and reads missing rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints.files import read_object, refuse_pointer
from attnres_serve.errors import CheckpointError
from attnres_serve.families import checks

GENERATION = "generation_config.json"
# Placeholders for images in the tokenizers of text models, which have no row for them.  A request
# with one is refused.
PLACEHOLDERS = frozenset({"<image_soft_token>"})  # of Gemma 3
ADDED, CONFIG = "added_tokens.json", "tokenizer_config.json"
_SPECIAL = re.compile(r"\w+_token|\w+_special_tokens")


_RANK = re.compile(rb"^(\S+) (\d+)$", re.M)  # a line of tiktoken: base64 of a token, and its id
_PIECE = b"\n"  # protobuf's tag of a SentencePiece piece, or of its text
_BYTES = 2  # protobuf's type of length-delimited values


def check(folder: Path, rows: int) -> None:
    """Refuse a tokenizer that cannot be read, or that has tokens without a row.

    Args:
        folder: of its files.
        rows: of the embedding, ``vocab_size``.

    Raises:
        CheckpointError: names the first such token, or the file.
    """
    beyond = {
        token: number
        for token, number in read(folder).items()
        if number >= rows and token not in PLACEHOLDERS
    }
    if not beyond:
        return
    first = min(beyond, key=lambda token: beyond[token])
    others = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
    raise CheckpointError(
        f"the tokenizer of {folder} has the token {first!r} with the id {beyond[first]}{others}, "
        f"and the embedding has rows for the ids 0 to {rows - 1} alone (vocab_size {rows}); resize "
        "the embedding (model.resize_token_embeddings) and save the model with it, remove the "
        "tokens, or put the tokenizer that the model was trained with in its place."
    )


def check_end(folder: Path, rows: int) -> None:
    """Refuse a generation_config.json with end-of-sequence tokens without a logit.

    Args:
        folder: of the file, which may be missing.
        rows: the number of logits, ``vocab_size``.

    Raises:
        CheckpointError: it has such tokens, or cannot be read.
    """
    if (folder / GENERATION).is_file():
        checks.check_ends(read_object(folder / GENERATION), GENERATION, rows)


def read(folder: Path) -> dict[str, int]:
    """The tokens of a tokenizer with their ids; empty for an unknown kind of file.

    Raises:
        CheckpointError: a file is damaged.
    """
    tokens: dict[str, int] = {}
    for name, reader in _READERS.items():
        if (folder / name).is_file():
            refuse_pointer(folder / name)
            tokens = reader(folder / name)
            if name == "tiktoken.model" and (folder / CONFIG).is_file():
                tokens |= _numbered(read_object(folder / CONFIG))
            break
    if (folder / ADDED).is_file():
        _add(tokens, read_object(folder / ADDED))
    for name in ("special_tokens_map.json", CONFIG):
        if (folder / name).is_file():
            _add(tokens, dict.fromkeys(_named(read_object(folder / name))))
    return tokens


def _add(tokens: dict[str, int], named: Mapping[str, int | None]) -> None:
    """Add tokens like transformers: after the last one.

    Args:
        tokens: the tokens so far.
        named: the tokens to add, with ids that count only without a vocabulary.
    """
    last = max(tokens.values(), default=None)
    for token, number in named.items():
        following = number if last is None else last + 1
        if token not in tokens and type(following) is int:
            tokens[token] = last = following


def _named(content: Mapping[str, Any]) -> Iterator[str]:
    """Tokens in the configuration of a tokenizer."""
    decoder = content.get("added_tokens_decoder")
    yield from _texts(list(decoder.values()) if isinstance(decoder, dict) else None)
    for key, value in content.items():
        if _SPECIAL.fullmatch(key):
            yield from _texts(value)


def _numbered(content: Mapping[str, Any]) -> dict[str, int]:
    """Tokens with their ids after tiktoken ranks."""
    decoder = content.get("added_tokens_decoder")
    pairs = decoder.items() if isinstance(decoder, dict) else ()
    return {text: int(number) for number, one in pairs if number.isdigit() for text in _texts(one)}


def _texts(token: Any) -> Iterator[str]:
    """The texts in a token, a list of tokens or an object of tokens."""
    if isinstance(token, str):
        yield token
    elif isinstance(token, list):
        for one in token:
            yield from _texts(one)
    elif isinstance(token, dict):
        yield from _texts(token["content"] if "content" in token else [*token.values()])


def _of_tokenizers(path: Path) -> dict[str, int]:
    content = read_object(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocabulary, list):  # of Unigram: pairs of a token and its score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {one["content"]: one["id"] for one in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError):
        return _checked(path, None)
    return _checked(path, vocabulary and {**vocabulary, **added})


def _of_json(path: Path) -> dict[str, int]:
    return _checked(path, read_object(path))


def _checked(path: Path, tokens: Any) -> dict[str, int]:
    """Check and return tokens.

    Raises:
        CheckpointError: they are no tokens with ids.
    """
    if not isinstance(tokens, dict) or not {*map(type, tokens.values())} == {int}:
        raise CheckpointError(
            f"{path} holds no vocabulary (tokens with their ids), so it is damaged or of another "
            "kind; copy or download it again."
        )
    return tokens


def _of_lines(path: Path) -> dict[str, int]:
    # Split only at line breaks: other characters at which `splitlines` splits are tokens.
    with path.open(encoding="utf-8", errors="replace") as lines:
        return {line.removesuffix("\n"): number for number, line in enumerate(lines)}


def _of_pieces(path: Path) -> dict[str, int]:
    """Tokens of SentencePiece, a protobuf list of pieces, or of tiktoken ranks."""
    content = path.read_bytes()
    if content[:1] != _PIECE:
        ranks = {token.decode(): int(rank) for token, rank in _RANK.findall(content)}
        return _checked(path, ranks or None)
    pieces: list[str] = []
    at = 0
    try:
        while at < len(content):
            tag, at = _varint(content, at)
            size, at = _varint(content, at)
            if tag & 7 != _BYTES or at + size > len(content):
                raise IndexError
            if tag >> 3 == 1:
                length, start = _varint(content, at + 1)  # after the tag of its text
                pieces.append(content[start : start + length].decode(errors="replace"))
            at += size
    except IndexError:
        return _checked(path, None)
    return {piece: number for number, piece in enumerate(pieces)}


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A protobuf number, and its end."""
    value = shift = 0
    while True:
        value |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 128:
            return value, at


_READERS: dict[str, Callable[[Path], dict[str, int]]] = {
    "tokenizer.json": _of_tokenizers,
    "vocab.json": _of_json,
    "vocab.txt": _of_lines,
    "tokenizer.model": _of_pieces,
    "spiece.model": _of_pieces,
    "tiktoken.model": _of_pieces,
}
