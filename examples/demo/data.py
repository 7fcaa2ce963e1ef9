"""The text of the demo, the sources of Python's standard library, and a tokenizer for it."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(3)
BYTE_END = 256  # what follows a text in a byte stream

# Installed packages, tests, tables, and build data full of the machine's own paths.
SKIPPED_FOLDERS = ("dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages")
SKIPPED_FOLDERS += ("test", "tests", "__pycache__")
SKIPPED_PREFIXES = ("_sysconfigdata", "__phello__")

# Line breaks take their indentation along and punctuation the space behind it, so a prompt that
# ends in "\n    " or "(self, " is cut into tokens just as the training text was.
WORDS = r"\s*\n\s*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+ ?|\s+"


def load_texts() -> tuple[list[str], list[str]]:
    """The training and the held-out texts. A text that occurs twice counts once."""
    library = Path(sysconfig.get_path("stdlib"))
    train: dict[str, None] = {}
    held_out: dict[str, None] = {}
    for path in sorted(p.relative_to(library) for p in library.rglob("*.py")):
        skipped = not set(path.parts).isdisjoint(SKIPPED_FOLDERS)
        if skipped or path.name.startswith(SKIPPED_PREFIXES):
            continue
        if text := read_text(library / path):
            (held_out if is_held_out(path) else train)[text] = None
    return list(train), [text for text in held_out if text not in train]


def is_held_out(path: Path) -> bool:
    """The split: one file in 24, by the SHA-256 of its path relative to the library."""
    return int(hashlib.sha256(path.as_posix().encode()).hexdigest(), 16) % 24 == 0


def read_text(path: Path) -> str:
    """The file's text, or nothing where it is not UTF-8."""
    try:
        return path.read_bytes().decode().replace("\r\n", "\n").strip()
    except UnicodeDecodeError:
        return ""


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer that begins every text with BOS."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(texts: list[str], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """All texts as tokens, each text followed by EOS."""
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, EOS], dtype=np.int64) for e in encoded])


def byte_stream(texts: list[str]) -> NDArray[np.int64]:
    """All texts as bytes, each text followed by BYTE_END."""
    return np.concatenate([np.array([*t.encode(), BYTE_END], dtype=np.int64) for t in texts])


def count_bytes(texts: list[str]) -> int:
    """Bytes of UTF-8 text, end marks not counted."""
    return sum(len(text.encode()) for text in texts)
