"""How far a sample must reach for a model's attention to do all that it does."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from attnres_serve.checkpoints import tokenizer
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.parsed_config import ParsedConfig

USUAL = 64  # tokens of a passage where nothing asks for more
BEYOND = 32  # tokens beyond a window
WIDEST = 4096  # window that is passed unasked: the float64 model's attention is quadratic in it


def tokens(parsed: ParsedConfig, asked: int | None, name: str) -> int:
    """The tokens of a passage: those asked for, else enough to pass a window.

    Args:
        parsed: of the served checkpoint.
        asked: by the user, if at all.
        name: what the checkpoint is called.

    Raises:
        SettingError: more were asked for than the context has.
    """
    most = _context(parsed) - 1  # the engine generates one more
    if asked is None:
        window = window_of(parsed) or 0
        return min(max(USUAL, window + BEYOND) if 0 < window <= WIDEST else USUAL, most)
    if asked > most:
        raise SettingError(
            f"--tokens is {asked}, but {name} has a context of {most + 1}, of which verify needs "
            f"one for an answer; give at most {most}."
        )
    return asked


def unreached(config: Mapping[str, Any], window: int | None, count: int) -> str | None:
    """What attention does only beyond the first ``count`` positions, None where that is nothing.

    Args:
        config: a config.json.
        window: its sliding window, see ``window_of``.
        count: the positions of a sample.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    limits = {
        "the window": window,
        "the length before rope scaling": rope.get("original_max_position_embeddings"),
    }
    missed = [f"{what} of {limit}" for what, limit in limits.items() if limit and count <= limit]
    if not missed:
        return None
    verb = "were" if len(missed) > 1 else "was"
    return f"positions 0 to {count - 1}; {' and '.join(missed)} {verb} not reached"


def window_of(parsed: ParsedConfig) -> int | None:
    """The sliding window, which is served only where every layer has it."""
    window = FAMILIES[parsed.base].window
    return window and window(parsed.config)


def _context(parsed: ParsedConfig) -> int:
    from attnres_serve.model import config as model_config  # imports transformers

    return model_config.build(parsed).max_position_embeddings


def passages(folder: Path, text: str | None, tokens: int, count: int) -> list[list[int]]:
    """``count`` passages of a text, evenly spaced, in the checkpoint's tokens.

    Ours goes on from its beginning where it is too short.

    Raises:
        CheckpointError: the checkpoint has no tokenizer.
        SettingError: the text cannot be read or is too short.
    """
    from attnres_serve.verify import oracle

    try:
        content = Path(text).read_text(encoding="utf-8") if text else str(oracle.__doc__)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the text {text} cannot be read ({error}).") from None
    ids = tokenizer.load(folder)(content)["input_ids"]
    if text is None:
        ids *= ceil(tokens / max(1, len(ids)))
    if len(ids) < tokens:
        raise SettingError(
            f"the text has {len(ids)} tokens; expected at least the {tokens} of a passage: give a "
            "longer one with --text or fewer --tokens."
        )
    step = (len(ids) - tokens) / max(1, count - 1)
    return [ids[round(i * step) : round(i * step) + tokens] for i in range(count)]
