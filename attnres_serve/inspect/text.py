"""Depth weights over whole texts: every piece is traced by itself, in an engine in this process."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from tqdm import tqdm

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.inspect import answer, ask, pieces
from attnres_serve.inspect.pieces import Piece
from attnres_serve.inspect.prepare import Opened
from attnres_serve.inspect.rows import SiteRow, rows_of
from attnres_serve.inspect.statistics import Statistics, Summary


def pieces_of(model: Opened, parts: Iterable[str]) -> Iterator[Piece]:
    """The pieces of a text, the first of which is read at once: what cannot be is known early.

    Args:
        model: whose tokenizer and length they have.
        parts: of the text.

    Raises:
        SettingError: the text cannot be read, or has no token.
    """
    found = pieces.pieces(model.tokenizer, parts, _longest(model))
    first = next(found, None)
    if first is None:
        raise SettingError("the text has no token; give some text.")
    return chain([first], found)


def summaries(
    name: str, model: Opened, texts: Sequence[Iterable[Piece]], flags: list[str]
) -> list[Summary]:
    """Start an engine and trace some texts.

    Args:
        name: what the checkpoint is called.
        model: the checkpoint.
        texts: their pieces.
        flags: of vLLM's engine, as given.

    Raises:
        SettingError: vLLM refuses the flags, or there is no trace with them.
    """
    rows = rows_of(model.sites)
    words = [*model.flags, f"--max-model-len={_longest(model)}", "--max-num-seqs=1", *flags]
    with output.bar(unit="token") as bar, ask.engine_of(words, bar) as engine:
        bar.set_description("tracing")
        return [summary(engine, name, rows, text, bar) for text in texts]


def summary(engine, name: str, rows: list[SiteRow], text: Iterable[Piece], bar: tqdm) -> Summary:
    """Trace a text, a piece at a time.

    Args:
        engine: one of which traces can be asked.
        name: what its checkpoint is called.
        rows: its sites.
        text: the pieces.
        bar: goes on by their tokens.

    Raises:
        SettingError: there is no trace, or the text cannot be read to its end.
    """
    statistics = Statistics(rows)
    for piece in text:
        statistics.add(_weights(engine, piece.ids, rows), np.array(piece.classes))
        bar.update(len(piece.ids))
    return statistics.summary(name)


def _weights(engine, ids: list[int], rows: list[SiteRow]) -> list[np.ndarray]:
    """The weights of every site for all tokens of a sequence, ``[T, n]`` float32.

    Raises:
        SettingError: there is no trace.
    """
    asked = ids, list(range(len(ids))), [row.index for row in rows]
    found = answer.merged(engine.collective_rpc("attn_res_trace", args=asked))
    ask.raise_first([found.problem])
    return [
        np.frombuffer(found.sites[row.index][0], np.float32).reshape(len(ids), -1) for row in rows
    ]


def _longest(model: Opened) -> int:
    return min(model.longest, pieces.LONGEST)
