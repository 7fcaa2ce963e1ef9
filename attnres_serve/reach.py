"""How far a sample must reach for a model's attention to do all that it does."""

from collections.abc import Mapping
from typing import Any

from attnres_serve.errors import SettingError
from attnres_serve.formats.translation import Translation

USUAL = 64  # tokens of a passage where nothing asks for more
BEYOND = 32  # tokens beyond a window
WIDEST = 4096  # window that is passed unasked: the float64 model's attention is quadratic in it


def tokens(translation: Translation, asked: int | None, name: str) -> int:
    """The tokens of a passage: those asked for, else enough to pass a window.

    Args:
        translation: of the served checkpoint.
        asked: by the user, if at all.
        name: what the checkpoint is called.

    Raises:
        SettingError: more were asked for than the context has.
    """
    most = _context(translation) - 1  # the engine generates one more
    if asked is None:
        window = _window(translation.config) or 0
        return min(max(USUAL, window + BEYOND) if 0 < window <= WIDEST else USUAL, most)
    if asked > most:
        raise SettingError(
            f"--tokens is {asked}, but {name} has a context of {most + 1}, of which verify needs "
            f"one for an answer; give at most {most}."
        )
    return asked


def unreached(config: Mapping[str, Any], count: int) -> str | None:
    """What attention does only beyond the first ``count`` positions, None where that is nothing."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    limits = {
        "the window": _window(config),
        "the length before rope scaling": rope.get("original_max_position_embeddings"),
    }
    missed = [f"{what} of {limit}" for what, limit in limits.items() if limit and count <= limit]
    if not missed:
        return None
    verb = "were" if len(missed) > 1 else "was"
    return f"positions 0 to {count - 1}; {' and '.join(missed)} {verb} not reached"


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window, which is served only where every layer has it."""
    windowed = "sliding_attention" in (config.get("layer_types") or ())
    return config["sliding_window"] if windowed else None


def _context(translation: Translation) -> int:
    from attnres_serve import configs  # imports transformers

    return configs.build(translation).max_position_embeddings
