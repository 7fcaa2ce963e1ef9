"""Collects the vectors of a replay: sources and mixes of sites, and outputs of sublayers."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnres_serve.kernels import reference
from attnres_serve.model.site_norm import SiteNorm


class Vectors:
    """Collects the vectors at ``positions``, which ascend."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = np.asarray(positions)
        self._passed: Counter[int] = Counter()  # tokens by site
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def take(self, index: int, sources: Sequence[Tensor], weights: Tensor) -> None:
        """Take the sources and the mix of a site; see ``lens.Reader.take``."""
        stacked = torch.stack(tuple(sources), dim=1).float()
        self._parts[f"site.{index}.sources"].append(stacked.cpu())
        self._parts[f"site.{index}.mix"].append(reference.weighted(stacked, weights).cpu())

    def __call__(self, norm: SiteNorm, arguments: tuple) -> None:
        """Take a site's input, before the site overwrites it; a forward pre-hook."""
        delta, index = norm.whole_delta(arguments[0]), norm.site.index
        at = self._positions - self._passed[index]
        self._passed[index] += len(delta)
        rows = torch.from_numpy(at[(at >= 0) & (at < len(delta))]).to(delta.device)
        self._parts[f"site.{index - 1}.output"].append(delta[rows].float().cpu())

    def packed(self) -> dict[str, tuple[list[int], bytes]]:
        """Shape and bytes of each tensor, float32, by its name in a response."""
        whole = {name: torch.cat(parts) for name, parts in self._parts.items()}
        return {name: ([*x.shape], x.numpy().tobytes()) for name, x in whole.items()}
