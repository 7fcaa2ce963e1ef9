"""Tokenizers that code of a checkpoint reads, as their models' folders have them."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoints.tensors import TOKENIZER_FILES

BYTES = [bytes([byte]) for byte in range(256)]
HAN = "中".encode()
SPECIAL = {"special": True, "normalized": False}
CODE = "raise RuntimeError('the folder has code of its own')\n"


def state(
    folder: Path, auto_map: Any, code: dict[str, str] | None = None, **config: Any
) -> dict[str, Any]:
    """Write a tokenizer_config.json and code beside it, in the place of what was there."""
    for name in TOKENIZER_FILES[:2]:
        (folder / name).unlink(missing_ok=True)
    for module, source in (code or {}).items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
    content = config if auto_map is None else config | {"auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return content


def write_ranks(path: Path, tokens: Iterable[bytes]) -> None:
    """A file of ranks, as tiktoken has them."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))


def write_kimi(
    folder: Path,
    tokens: Iterable[bytes] = (*BYTES, HAN[:2], HAN, HAN + b"a"),
    special: Iterable[str] = ("[BOS]", "[EOS]"),
    code: str | None = CODE,
    module: str = "tokenization_kimi",
    **config: Any,
) -> Path:
    """Kimi's tokenizer beside whatever else is in a folder.

    Args:
        folder: where it goes.
        tokens: of the ranks; by default ``中`` is one, and so is ``中a``, which Kimi's pattern
            parts.
        special: the names of the first tokens behind them.
        code: of its module; None leaves it out.
        module: the name of the module.
        config: further keys of tokenizer_config.json.
    """
    folder.mkdir(exist_ok=True)
    tokens = list(tokens)
    write_ranks(folder / "tiktoken.model", tokens)
    named = {str(len(tokens) + n): {"content": name, **SPECIAL} for n, name in enumerate(special)}
    given = {
        "added_tokens_decoder": named,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    auto_map = {"AutoTokenizer": [f"{module}.TikTokenTokenizer", None]}
    source = {} if code is None else {module: code}
    state(folder, auto_map, source, **given | config)
    return folder
