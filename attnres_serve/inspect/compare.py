"""``attnres-serve inspect --against``: two texts or checkpoints, and their difference."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from attnres_serve.errors import SettingError
from attnres_serve.inspect import difference, given, numbers, prepare
from attnres_serve.inspect.pieces import parts_of_file
from attnres_serve.inspect.rows import rows_of

LONGEST_NAME = 24  # characters of a prompt in a title


class Text(NamedTuple):
    """A text of the two.

    Attributes:
        source: its file, or the text itself.
        name: what a figure calls it.
        parts: reads it from its beginning.
    """

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

    names = [checkpoint, own.against or checkpoint]
    if names[0] == names[1] and texts[0].source == texts[1].source:
        raise SettingError("both sides are the same; name another checkpoint or text.")
    models = [prepare.opened(name, own.max_model_len, flags) for name in dict.fromkeys(names)]
    first, second = models[0], models[-1]
    difference.require_same((names[0], names[1]), (rows_of(first.sites), rows_of(second.sites)))
    longest = min(first.longest, second.longest)
    models = [model._replace(longest=longest) for model in models]
    pieces = [
        text.pieces_of(model, one.parts())
        for model, one in zip((models[0], models[-1]), texts, strict=True)
    ]
    if len(models) == 1:
        found = text.summaries(checkpoint, models[0], pieces, flags)
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
    if own.text is None:
        first = _prompt(given.prompt(own.prompt, own.prompt_file))
    elif own.prompt is None and own.prompt_file is None:
        first = _file("--text", own.text)
    else:
        raise SettingError("give --text FILE or a prompt, one of them.")
    if own.against_text is not None and own.against_prompt is not None:
        raise SettingError("give --against-text FILE or --against-prompt TEXT, one of them.")
    if own.against_prompt == "":
        raise SettingError("--against-prompt is empty; give some text.")
    second = first
    if own.against_prompt is not None:
        second = _prompt(own.against_prompt)
    elif own.against_text is not None:
        second = _file("--against-text", own.against_text)
    if first.source == second.source == given.STDIN:
        raise SettingError("the standard input can be read once; give a file as --text.")
    return first, second


def _prompt(text: str) -> Text:
    short = text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
    return Text(text, f"“{short}”", lambda: [text])


def _file(flag: str, name: str) -> Text:
    return Text(name, Path(name).name, lambda: parts_of_file(flag, name))


def _titles(checkpoints: Sequence[str], texts: Sequence[Text]) -> tuple[str, str]:
    """What differs between the two, in words."""
    first, second = ["first"], ["second"]
    if checkpoints[0] != checkpoints[1]:
        short = [Path(name).name for name in checkpoints]
        told = short if short[0] != short[1] else checkpoints
        first.append(told[0])
        second.append(told[1])
    if texts[0].source != texts[1].source:
        first.append(texts[0].name)
        second.append(texts[1].name)
    return ": ".join(first), ": ".join(second)
