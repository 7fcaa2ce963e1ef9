"""The passages of a text that verify compares, long enough for windows and chunks."""

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from attnres_serve import texts
from attnres_serve.checkpoints import tokenizer
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.parsed_config import ParsedConfig

USUAL = 64  # default tokens of a passage
BEYOND = 32  # tokens beyond a window
# The largest window or chunk that a passage exceeds by default: the float64 model's attention is
# quadratic in the length.
WIDEST = 4096
TOGETHER = 64  # tokens of a chunk if config.json states none: that of FLA's GPU kernels
WINDOW, CHUNK = "the window", "the chunk of its recurrence"
SCALED = "the length before rope scaling"
# Keys of the window in transformers' configurations, by kind of layer.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def tokens(
    served: ParsedConfig, limits: Mapping[str, int], requested: int | None, name: str
) -> int:
    """The number of tokens of a passage: as requested, or enough to exceed windows and chunks.

    Args:
        served: the served model.
        limits: the result of ``limits``.
        requested: the user's value, or None.
        name: the checkpoint's name.

    Raises:
        SettingError: more tokens were requested than the context has.
    """
    most = context(served) - 1  # the engine generates one more
    if requested is None:
        widths = [width for what, width in limits.items() if what != SCALED and width <= WIDEST]
        return min(max([USUAL, *(width + BEYOND for width in widths)]), most)
    if requested > most:
        raise SettingError(
            f"--tokens is {requested}, but {name} has a context of {most + 1}, of which verify "
            f"needs one for an answer; give at most {most}."
        )
    return requested


def context(parsed: ParsedConfig) -> int:
    """The number of positions that a model was made for."""
    most: int = _built(parsed).max_position_embeddings
    return most


def limits(*models: ParsedConfig) -> dict[str, int]:
    """The number of positions before something changes in a sublayer, by the name of the change.

    For several models the largest counts: a model that lost its window differs only beyond it.
    """
    result: dict[str, int] = {}
    for parsed in models:
        for what, limit in _limits(parsed):
            result[what] = max(result.get(what, 0), limit)
    return result


def _limits(parsed: ParsedConfig) -> Iterator[tuple[str, int]]:
    built = _built(parsed)
    kinds = getattr(built, "layer_types", None) or ()
    windows = [getattr(built, key) for kind, key in _WINDOWS.items() if kind in kinds]
    of_all = FAMILIES[parsed.family].window  # in every layer; some classes keep no kinds of layers
    if window := of_all(parsed.config) if of_all else max(windows, default=None):
        yield WINDOW, window
    if FAMILIES[parsed.family].state_bytes(parsed.config, 4):  # chunks pass their state on
        yield CHUNK, getattr(built, "chunk_size", None) or TOGETHER
    rope = getattr(built, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if length := one.get("original_max_position_embeddings"):
            yield SCALED, length


def _built(parsed: ParsedConfig) -> Any:
    from attnres_serve.model import config as model_config  # imports transformers

    return model_config.build(parsed)


def unreached(limits: Mapping[str, int], count: int) -> str | None:
    """A sentence about the limits that ``count`` positions do not exceed, or None.

    Args:
        limits: the result of ``limits``.
        count: number of positions of a passage.
    """
    missed = [f"{what} of {limit}" for what, limit in limits.items() if count <= limit]
    if not missed:
        return None
    verb = "were" if len(missed) > 1 else "was"
    return f"positions 0 to {count - 1}; {' and '.join(missed)} {verb} not reached"


def passages(folder: Path, text: str | None, tokens: int, count: int) -> list[list[int]]:
    """Up to ``count`` evenly spaced passages of a text, as the checkpoint's token ids.

    The default text repeats if it is too short.

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
        SettingError: it cannot be read, or is not UTF-8.
    """
    try:
        return texts.decoded(Path(path).read_bytes(), f"the text {path}")
    except OSError as error:
        raise SettingError(f"the text {path} cannot be read ({error}).") from None
