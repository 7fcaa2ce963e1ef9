"""How far a sample must reach for a model's sublayers to do all that they do."""

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from attnres_serve import texts
from attnres_serve.checkpoints import tokenizer
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.parsed_config import ParsedConfig

USUAL = 64  # tokens of a passage where nothing asks for more
BEYOND = 32  # tokens beyond a window
# Of a window or chunk that is passed unasked: the judge's attention is quadratic in it.
WIDEST = 4096
TOGETHER = 64  # tokens of a chunk where config.json leaves it to the kernels: FLA's, on a GPU
WINDOW, CHUNK = "the window", "the chunk of its recurrence"
SCALED = "the length before rope scaling"
# Which key of a configuration of transformers has the window of a kind of layer.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def tokens(served: ParsedConfig, limits: Mapping[str, int], asked: int | None, name: str) -> int:
    """The tokens of a passage: those asked for, else enough to pass a window or a chunk.

    Args:
        served: the model that is served.
        limits: of ``limits``.
        asked: by the user, if at all.
        name: what the checkpoint is called.

    Raises:
        SettingError: more were asked for than the context has.
    """
    most = context(served) - 1  # the engine generates one more
    if asked is None:
        widths = [width for what, width in limits.items() if what != SCALED and width <= WIDEST]
        return min(max([USUAL, *(width + BEYOND for width in widths)]), most)
    if asked > most:
        raise SettingError(
            f"--tokens is {asked}, but {name} has a context of {most + 1}, of which verify needs "
            f"one for an answer; give at most {most}."
        )
    return asked


def context(parsed: ParsedConfig) -> int:
    """The positions that a model was made for."""
    most: int = _built(parsed).max_position_embeddings
    return most


def limits(*models: ParsedConfig) -> dict[str, int]:
    """How many positions a sublayer treats alike, by what changes beyond them.

    Of several models the largest counts: one that lost its window differs beyond that window alone.
    """
    found: dict[str, int] = {}
    for parsed in models:
        for what, limit in _limits(parsed):
            found[what] = max(found.get(what, 0), limit)
    return found


def _limits(parsed: ParsedConfig) -> Iterator[tuple[str, int]]:
    built = _built(parsed)
    kinds = getattr(built, "layer_types", None) or ()
    windows = [getattr(built, key) for kind, key in _WINDOWS.items() if kind in kinds]
    of_all = FAMILIES[parsed.base].window  # in every layer, of which some classes keep no kinds
    if window := of_all(parsed.config) if of_all else max(windows, default=None):
        yield WINDOW, window
    if FAMILIES[parsed.base].state_bytes(parsed.config, 4):  # which a chunk hands on to the next
        yield CHUNK, getattr(built, "chunk_size", None) or TOGETHER
    rope = getattr(built, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if length := one.get("original_max_position_embeddings"):
            yield SCALED, length


def _built(parsed: ParsedConfig) -> Any:
    from attnres_serve.model import config as model_config  # imports transformers

    return model_config.build(parsed)


def unreached(limits: Mapping[str, int], count: int) -> str | None:
    """What a model does only beyond the first ``count`` positions, None where that is nothing.

    Args:
        limits: of ``limits``.
        count: the positions of a sample.
    """
    missed = [f"{what} of {limit}" for what, limit in limits.items() if count <= limit]
    if not missed:
        return None
    verb = "were" if len(missed) > 1 else "was"
    return f"positions 0 to {count - 1}; {' and '.join(missed)} {verb} not reached"


def passages(folder: Path, text: str | None, tokens: int, count: int) -> list[list[int]]:
    """Up to ``count`` passages of a text, evenly spaced, in the checkpoint's tokens.

    Ours goes on from its beginning where it is too short.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
        SettingError: the text cannot be read or is too short.
    """
    from attnres_serve.verify.oracle import model

    content = read(text) if text else str(model.__doc__)
    ids = tokenizer.load(folder)(content)["input_ids"]
    if text is None:
        ids *= ceil(tokens / max(1, len(ids)))
    if len(ids) < tokens:
        raise SettingError(
            f"the text has {len(ids)} tokens; expected at least the {tokens} of a passage: give a "
            "longer one with --text or fewer --tokens."
        )
    step = (len(ids) - tokens) / max(1, count - 1)
    starts = dict.fromkeys(round(i * step) for i in range(count))
    return [ids[start : start + tokens] for start in starts]


def read(path: str) -> str:
    """The text of a file.

    Raises:
        SettingError: it cannot be read, or is no UTF-8.
    """
    try:
        return texts.decoded(Path(path).read_bytes(), f"the text {path}")
    except OSError as error:
        raise SettingError(f"the text {path} cannot be read ({error}).") from None
