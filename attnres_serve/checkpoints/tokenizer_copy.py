"""Copies of tokenizers that transformers and vLLM read correctly, in our cache.

A copy's name is a hash of its sources, so every process and every start finds the same one.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from attnres_serve import cache_folder
from attnres_serve.checkpoints import kimi_tokenizer
from attnres_serve.checkpoints.files import read_object
from attnres_serve.checkpoints.tokenizer_class import CONFIG, FAST, Way
from attnres_serve.errors import CheckpointError

MADE_BY = "1"  # raise it if the same files give another copy
TEMPLATES = ("chat_template*", "additional_chat_templates/*.jinja")
ADDED = ("special_tokens_map.json", "added_tokens.json")
# Keys that would make transformers use another class.
LEFT = ("auto_map", "tokenizer_class", "fast_tokenizer_files")


def of(folder: Path, way: Way, rows: int | None) -> Path:
    """A folder with a tokenizer.json, which is read without the checkpoint's code.

    Args:
        folder: of the tokenizer.
        way: ``FAST_FILE`` or ``KIMI``.
        rows: of the embedding; None if unknown.

    Raises:
        CheckpointError: a file is damaged, or the cache cannot be written.
    """
    is_kimi = way is Way.KIMI
    vocabulary = kimi_tokenizer.RANKS_FILE if is_kimi else FAST
    kinds = TEMPLATES if is_kimi else (*TEMPLATES, *ADDED)
    taken = sorted(path for kind in kinds for path in folder.glob(kind) if path.is_file())
    if is_kimi:
        ranks = kimi_tokenizer.ranks(folder)
        tokens = kimi_tokenizer.special_tokens(folder, len(ranks), rows)
        config = kimi_tokenizer.translated_config(folder, tokens)
    else:
        config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    config = {key: value for key, value in config.items() if key not in LEFT}
    parts = [MADE_BY, way.name, json.dumps([config, tokens if is_kimi else None])]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (folder / vocabulary, *taken):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    try:
        place = cache_folder.made("tokenizers") / digest.hexdigest()[:32]
        if place.is_dir():
            return place
        made = Path(mkdtemp(dir=place.parent))
        try:
            if is_kimi:
                kimi_tokenizer.fast_tokenizer(ranks, tokens).save(str(made / FAST), pretty=False)
            else:
                shutil.copyfile(folder / FAST, made / FAST)
            _fill(made, folder, taken, config)
            _move(made, place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer of {folder} has no place for the copy that is read ({error}); set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from None
    return place


def _fill(made: Path, folder: Path, taken: list[Path], config: dict[str, Any]) -> None:
    """Write the files that belong to a tokenizer.json."""
    for path in taken:
        target = made / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    content = config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (made / CONFIG).write_text(json.dumps(content), encoding="utf-8")
    # vLLM warns twice of a tokenizer without a model type.  This one has no tokenizer class.
    (made / "config.json").write_text('{"model_type": "granite"}', encoding="utf-8")


def _move(made: Path, place: Path) -> None:
    """Move a finished copy into place, unless another process was faster."""
    try:
        os.rename(made, place)
    except OSError:
        if not place.is_dir():
            raise
