"""A trace in Python: ``attnres_serve.Trace``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnres_serve.errors import SettingError
from attnres_serve.inspect import files, notebook, tables
from attnres_serve.inspect.answer import Trace as Answer
from attnres_serve.inspect.labelled import Labelled


class Trace(Labelled):
    """What the sites of a text attend to, as NumPy arrays over named axes.

    | array | axes | |
    |---|---|---|
    | ``weights``, ``rms`` | site, token, source | NaN where a site has no such source |
    | ``entropy`` | site, token | of the weights, in nats |
    | ``next`` | token | with ``logprobs``: of the token that follows, NaN at the end |
    | ``top_id``, ``top_text``, ``top_logprob`` | token, rank | the most probable tokens |
    | ``unedited_next``, ``unedited_top_id``, ... | as above | with edits: the same without them |
    | ``lens_next`` | vector, token | with ``lens``: the same by each mix and each sum |
    | ``lens_top_id``, ``lens_top_text``, ``lens_top_logprob`` | vector, token, lens_rank | |

    Numbers are float64, ids int64, and texts objects.  ``axes`` has the labels of the axes: indices
    of sites, names of sources, positions of tokens, such names of vectors as ``site 9 mix`` and
    ``block 1``, and ranks from 0.  ``labels`` has ``layer`` (-1 for the final site) and ``kind`` of
    the sites, ``token_id`` and ``token_text`` of the tokens, and ``vector_site`` (-1 for a sum that
    is the same at every site) and ``vector_name`` of the vectors.

    Args:
        answer: of ``POST /v1/attn_res/trace``, with numbers that fit together.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        counts = f"{len(answer.sites)} sites, {len(answer.tokens)} tokens"
        super().__init__(
            f"trace of {answer.model}: {counts}{', edited' if answer.edits else ''}",
            tables.arrays(answer),
            tables.axes(answer),
            tables.labels(answer),
            tables.facts(answer),
        )

    def __sub__(self, other: "Trace") -> Labelled:
        """By how much the numbers of two traces of the same tokens and sites differ.

        The result has the arrays that both have, except the most probable tokens: those of a rank
        may be others.

        Raises:
            SettingError: they are of other sites, sources or tokens.
        """
        if not isinstance(other, Trace):
            return NotImplemented
        first, second = self.answer, other.answer
        _require_equal("sites or sources", _sites(first), _sites(second))
        _require_equal("tokens", _tokens(first), _tokens(second))
        arrays = {
            name: array._replace(values=array.values - other[name])
            for name, array in self.arrays.items()
            if name in other.arrays and not {*tables.RANKS} & {*array.axes}
        }
        used = {axis for array in arrays.values() for axis in array.axes}
        axes = {axis: labels for axis, labels in self.axes.items() if axis in used}
        labels = {name: label for name, label in self.labels.items() if label.axis in used}
        titles = {"first": self.title, "second": other.title}
        return Labelled(f"{self.title}\nless {other.title}", arrays, axes, labels, titles)

    def _repr_html_(self) -> str | None:
        return notebook.shown(self.answer, self.title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, as the JSON that the server answers or as arrays.

        ``attnres-serve inspect --from`` draws either.  ``numpy.load`` reads the arrays of a .npz
        file, the axes and their labels by their names.

        Args:
            path: a name that ends with .json or .npz.

        Raises:
            SettingError: the name ends otherwise, or the file cannot be written.
        """
        labels = {name: label.values for name, label in self.labels.items()}
        every = {name: self[name] for name in self} | self.axes | labels
        files.write(Path(path), self.answer, {name: _plain(every[name]) for name in every})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read a trace that ``save``, ``inspect --out FILE.json`` or the server's route wrote.

        Raises:
            SettingError: it is none, or its numbers do not fit its tokens and sources.
        """
        return cls(files.read(Path(path)))


def _plain(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """The values as an array without objects, which NumPy would pickle."""
    array = np.asarray(values)
    return array.astype(np.str_) if array.dtype == object else array


def _sites(trace: Answer) -> list[tuple[object, ...]]:
    return [(site.index, site.layer, site.kind, site.sources) for site in trace.sites]


def _tokens(trace: Answer) -> list[tuple[object, ...]]:
    return [(token.position, token.id) for token in trace.tokens]


def _require_equal(what: str, first: object, second: object) -> None:
    if first != second:
        raise SettingError(
            f"these traces have other {what}, so their numbers do not belong together; trace the "
            "same text at the same sites, or subtract arrays."
        )
