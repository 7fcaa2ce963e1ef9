"""A trace in Python: ``attnres_serve.Trace``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve.lens import depth_map, files
from attnres_serve.lens.dataset import dataset
from attnres_serve.lens.vectors import Tensors, datasets
from attnres_serve.tracing.answer import TraceAnswer

if TYPE_CHECKING:
    import xarray


class Trace:
    """The sources that sites attend to, as an ``xarray.Dataset``.

    | variable | dimensions | |
    |---|---|---|
    | ``weights``, ``rms`` | site, token, source | NaN for sources that a site lacks |
    | ``entropy`` | site, token | of the weights, in nats |
    | ``next`` | token | with ``logprobs``: logprob of the next token, NaN at the end |
    | ``top_logprob`` | token, rank | logprobs of the most probable tokens |
    | ``unedited_next``, ``unedited_top_logprob`` | as above | with edits: the same without them |
    | ``lens_next`` | site, token, source | with ``lens``: the same by each source alone |
    | ``lens_top_logprob`` | site, token, source, lens_rank | |
    | ``lens_mix_next``, ``lens_mix_top_logprob`` | as above without source | by each site's mix |

    Coordinates are the indices of sites, names of sources, positions of tokens, and ranks from 0;
    ``layer`` (-1 for the final site) and ``kind`` of the sites, ``token_id`` and ``token_text`` of
    the tokens, and ``top_id`` and ``top_text`` of the most probable ones (-1 and ``""`` for sources
    that a site lacks).

    Attributes:
        data: the dataset.
        answer: the response of ``POST /v1/attn_res/trace``; its shapes were checked.
        vectors: with ``vectors``, by site a dataset of float32: ``sources`` (token, source,
            hidden), ``mix`` and, for the sublayer after the site, ``output`` (token, hidden).
            ``save`` does not write them.
    """

    def __init__(self, answer: TraceAnswer, tensors: Tensors | None = None) -> None:
        self.answer = answer
        self.data: xarray.Dataset = dataset(answer)
        self.vectors = datasets(answer, tensors or {})

    def __getitem__(self, name: str) -> "xarray.DataArray":
        """The variable or coordinate of this name."""
        return self.data[name]

    def __repr__(self) -> str:
        return f"{self._title}\n{self.data}"

    def _repr_html_(self) -> str | None:
        return depth_map.shown(self.answer, self._title)

    @property
    def _title(self) -> str:
        counts = f"{len(self.answer.sites)} sites, {len(self.answer.tokens)} tokens"
        return f"trace of {self.answer.model}: {counts}{', edited' if self.answer.edits else ''}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as the server's JSON, which ``inspect --from`` draws.

        Args:
            path: a name that ends with .json; ``data.to_netcdf`` and the like write arrays.

        Raises:
            SettingError: the suffix is not .json, or the file cannot be written.
        """
        files.write(Path(path), self.answer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read a trace that ``save``, ``inspect --out FILE.json`` or the server's route wrote.

        Raises:
            SettingError: it is no trace, or its numbers do not fit its tokens and sources.
        """
        return cls(files.read(Path(path)))
