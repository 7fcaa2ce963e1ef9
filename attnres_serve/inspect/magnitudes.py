"""Magnitudes over depth: RMS of what every sublayer gives, and of the mix that every site reads.

The paper (arXiv 2603.15031) shows the magnitudes of outputs by depth, which grow without AttnRes.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnres_serve.compat import decoder
from attnres_serve.depth.layout import Layout
from attnres_serve.errors import SettingError
from attnres_serve.inspect import record
from attnres_serve.inspect.listen import TOKENS_AT_ONCE, folded, rms, sources_of
from attnres_serve.inspect.rows import SiteRow, arrays_of, columns
from attnres_serve.inspect.statistics import PERCENTILES
from attnres_serve.kernels import reference
from attnres_serve.model.site_norm import SiteNorm


class Listener:
    """Hooks of all sites of a pipeline stage.

    Attributes:
        received: by site, parts of ``[T]`` float32: RMS of what the sublayer before it gave, at
            site 0 of the embedding.
        mixed: by site that mixes, the same of its mix.
    """

    def __init__(self) -> None:
        self.received: dict[int, list[Tensor]] = {}
        self.mixed: dict[int, list[Tensor]] = {}

    def before(self, norm: SiteNorm, arguments: tuple) -> None:
        """Measure what a site receives, before it may write over it."""
        self.received.setdefault(norm.site.index, []).append(rms(arguments[0]).cpu())

    def after(self, norm: SiteNorm, arguments: tuple, output) -> None:
        """Measure the mix of a site that mixes."""
        sources, _ = sources_of(norm, arguments, output)
        site = norm.site_weights()
        query = folded(site)
        for parts in zip(*(source.split(TOKENS_AT_ONCE) for source in sources), strict=True):
            mix, _ = reference.mix(parts, query, site.key_eps, bias=site.bias)
            self.mixed.setdefault(norm.site.index, []).append(rms(mix).cpu())


def measure(worker, ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Replay a sequence; every worker of the engine does so at once.

    Args:
        worker: vLLM's.
        ids: the sequence.

    Returns:
        For every site of this worker's pipeline stage ``[T]`` float32 each: the RMS of what it
        receives and of its mix, NaN if it does not mix.

    Raises:
        TraceError, SiteOrderError: as of ``record.record``, which validates the mixes.
    """
    installed = decoder.inner_model(worker).attn_res_sites
    listener = Listener()
    with ExitStack() as hooks:
        for norm in installed.values():
            hooks.callback(norm.register_forward_pre_hook(listener.before).remove)
            if norm.site.mixes:
                hooks.callback(norm.register_forward_hook(listener.after).remove)
        record.record(worker, ids, range(len(ids)), list(installed))
    nothing = torch.full((len(ids),), torch.nan)
    return {
        index: (
            torch.cat(parts),
            torch.cat(listener.mixed[index]) if index in listener.mixed else nothing,
        )
        for index, parts in listener.received.items()
    }


class Magnitudes(NamedTuple):
    """Magnitudes of a text, of ``S`` sites.

    Attributes:
        rows: the sites.
        output: ``[3, S]`` float64: mean, 10 % and 90 % quantile over the tokens of the RMS of what
            the sublayer behind a site gives; NaN for the final site, which has none.
        mix: the same of the mix that it reads.
    """

    rows: list[SiteRow]
    output: np.ndarray
    mix: np.ndarray


def summary(rows: list[SiteRow], found: dict[int, tuple[np.ndarray, np.ndarray]]) -> Magnitudes:
    """Mean and quantiles of what ``measure`` gives for all sites.

    Args:
        rows: the sites; those of the other checkpoint where another is measured beside it.
        found: by site, of which there may be more.
    """
    nothing = np.full(3, np.nan)
    outputs = [nothing if row.layer is None else _spread(found[row.index + 1][0]) for row in rows]
    mixes = [_spread(found[row.index][1]) for row in rows]
    return Magnitudes(rows, np.stack(outputs, 1), np.stack(mixes, 1))


def _spread(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return np.array([wide.mean(), *np.percentile(wide, PERCENTILES)])


def require_same(names: tuple[str, str], layouts: tuple[Layout, Layout]) -> None:
    """Refuse checkpoints whose sublayers do not belong together.

    Args:
        names: of the two.
        layouts: of each.

    Raises:
        SettingError: they have other sublayers.
    """
    first, second = ([(one.layer, one.kind) for one in own.sublayers] for own in layouts)
    if len(first) != len(second):
        found = f"{names[0]} has {len(first)} sublayers and {names[1]} {len(second)}"
    elif first != second:
        at = next(at for at, pair in enumerate(zip(first, second, strict=True)) if len({*pair}) > 1)
        words = [own.site_name(at) for own in layouts]
        found = f"sublayer {at} is {words[0]} in {names[0]} and {words[1]} in {names[1]}"
    else:
        return
    raise SettingError(f"{found}; expected two checkpoints with the same sublayers.")


def table(*found: Magnitudes) -> dict[str, list]:
    """A row for each site of a text, or of the first of two, with the numbers of both."""
    return columns(found[0].rows) | {name: list(part) for name, part in _of_all(found).items()}


def arrays(*found: Magnitudes) -> dict[str, np.ndarray]:
    """The same as arrays."""
    return arrays_of(found[0].rows) | _of_all(found)


def _of_all(found: Sequence[Magnitudes]) -> dict[str, np.ndarray]:
    if len(found) == 1:
        return _numbers(found[0])
    return {
        f"{which}_{name}": part
        for which, own in zip(("first", "second"), found, strict=True)
        for name, part in _numbers(own).items()
    }


def _numbers(found: Magnitudes) -> dict[str, np.ndarray]:
    return {
        f"{what}_{name}": part
        for what, parts in (("output", found.output), ("mix", found.mix))
        for name, part in zip(("mean", "low", "high"), parts, strict=True)
    }
