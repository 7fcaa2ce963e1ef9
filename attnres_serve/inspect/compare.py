"""``attnres-serve inspect --against``: two texts or checkpoints, and their difference."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from attnres_serve.errors import SettingError
from attnres_serve.inspect import difference, given, numbers, prepare
from attnres_serve.inspect.pieces import parts_of_file
from attnres_serve.inspect.rows import rows_of

LONGEST_NAME = 24  # characters of a prompt in a title
BEFORE = 8  # of them before the first that two prompts do not share


class Text(NamedTuple):
    """A text of the two.

    Attributes:
        is_file: whether it is read from a file.
        source: the file's name, or the text itself.
        name: what a figure calls it.
        parts: reads it from its beginning.
    """

    is_file: bool
    source: str
    name: str
    parts: Callable[[], Iterable[str]]


def run(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Draw both means of the depth weights and their difference, and write them as numbers.

    Args:
        checkpoint: the first one: a folder, or a model id whose files are in the Hugging Face
            cache.
        own: the flags of ours.
        flags: of vLLM's engines.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--against starts engines; give a checkpoint right after `inspect`.")
    paths = numbers.outputs(own.numbers, own.out)
    texts = _texts(own)
    from attnres_serve.inspect import text

    both = [checkpoint, own.against or checkpoint]
    if both[0] == both[1] and not _differ(texts):
        raise SettingError("both sides are the same; name another checkpoint or text.")
    models = [prepare.opened(name, own.max_model_len, flags) for name in dict.fromkeys(both)]
    first, second = models[0], models[-1]
    shown = prepare.name_of(checkpoint, flags)
    names = [shown, shown if len(models) == 1 else both[1]]
    difference.require_same((names[0], names[1]), (rows_of(first.sites), rows_of(second.sites)))
    longest = min(first.longest, second.longest)
    models = [model._replace(longest=longest) for model in models]
    pieces = [
        text.pieces_of(model, one.parts())
        for model, one in zip((models[0], models[-1]), texts, strict=True)
    ]
    if len(models) == 1:
        found = text.summaries(shown, models[0], pieces, flags)
    else:
        found = [
            *text.summaries(names[0], models[0], pieces[:1], flags),
            *text.summaries(names[1], models[1], pieces[1:], flags),
        ]

    def draw(path: Path) -> None:
        from attnres_serve.inspect import text_figure

        titles = _titles(names, texts)
        text_figure.write_difference((found[0], found[1]), titles, path)

    numbers.write(paths, draw, difference.table(*found), difference.arrays(*found))
    return 0


def _texts(own: argparse.Namespace) -> tuple[Text, Text]:
    """Both texts; the second is the first unless another is given."""
    firsts = own.text, own.prompt, own.prompt_file
    seconds = own.against_text, own.against_prompt
    if firsts.count(None) == len(firsts):
        raise SettingError(
            "give the first text by --text FILE, --prompt TEXT or --prompt-file FILE, one of them."
        )
    if seconds.count(None) == 0:
        raise SettingError("give --against-text FILE or --against-prompt TEXT, one of them.")
    again = seconds if any(seconds) else (own.text,)  # a file is read for each checkpoint
    if (firsts + again).count(given.STDIN) > 1:
        raise SettingError("the standard input can be read once; give a file as --text.")
    if own.text is None:
        first = _prompt(given.prompt(own.prompt, own.prompt_file))
    elif own.prompt is None and own.prompt_file is None:
        first = _file("--text", own.text)
    else:
        raise SettingError("give --text FILE or a prompt, one of them.")
    second = first
    if own.against_prompt is not None:
        second = _prompt(given.prompt(own.against_prompt, None, "--against-prompt"))
    elif own.against_text is not None:
        second = _file("--against-text", own.against_text)
    return first, second


def _prompt(text: str) -> Text:
    return Text(False, text, _quoted(text), lambda: [text])


def _quoted(text: str) -> str:
    return f"“{text if len(text) <= LONGEST_NAME else f'{text[: LONGEST_NAME - 1]}…'}”"


def _file(flag: str, name: str) -> Text:
    return Text(True, name, Path(name).name, lambda: parts_of_file(flag, name))


def _differ(texts: Sequence[Text]) -> bool:
    first, second = ((one.is_file, one.source) for one in texts)
    return first != second


def _titles(checkpoints: Sequence[str], texts: Sequence[Text]) -> tuple[str, str]:
    """What differs between the two, in words."""
    told: list[Sequence[str]] = [("first", "second")]
    if checkpoints[0] != checkpoints[1]:
        short = [Path(name).name for name in checkpoints]
        told.append(short if short[0] != short[1] else checkpoints)
    if _differ(texts):
        told.append(_names(*texts))
    first, second = (": ".join(names) for names in zip(*told, strict=True))
    return first, second


def _names(first: Text, second: Text) -> tuple[str, str]:
    """What tells two texts apart: the last part of their paths, or how they begin, if it does."""
    if first.name != second.name:
        return first.name, second.name
    if first.is_file:
        return first.source, second.source
    signs = enumerate(zip_longest(first.source, second.source))
    begin = next(at for at, (one, other) in signs if one != other) - BEFORE
    return _quoted(f"…{first.source[begin:]}"), _quoted(f"…{second.source[begin:]}")
