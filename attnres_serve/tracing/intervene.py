"""The hook that applies edits to the sites of a replay, for the tokens that the edits name.

The depth state of a site holds its sources with every algorithm and backend; its output is their
normed mix.  So an edit is a forward hook that computes that mix again, by the specification,
``kernels.reference``.  A row whose weights no edit changes keeps the bits of the site's output.

Edited logits are float64, so that products of factors do not overflow and weights do not underflow.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from attnres_serve.depth.resolved_edits import Resolved, mask
from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import MASKED, SiteWeights
from attnres_serve.model.site_norm import SiteNorm
from attnres_serve.tracing.listen import TOKENS_AT_ONCE, folded, sources_of


class Intervention:
    """A forward hook of the edited sites.

    Args:
        edits: the result of ``resolved_edits.resolve``, in the order in which they are applied.
    """

    def __init__(self, edits: Iterable[Resolved]) -> None:
        edits = list(edits)
        self._end = max((edit.runs[-1][1] for edit in edits), default=0)
        self._edits: dict[int, list[tuple[Resolved, list[int], np.ndarray]]] = defaultdict(list)
        self._replacing = self._edits.copy()
        self._masks: dict[int, np.ndarray] = {}  # tokens that any edit of a site changes
        for edit in edits:
            is_edited = mask(edit.runs, self._end + 1)  # the last: all tokens after the edits
            kept = self._replacing if edit.kind == "replace" else self._edits
            for index, columns in edit.sites:
                kept[index].append((edit, columns, is_edited))
                self._masks[index] = self._masks.get(index, False) | is_edited
        self._seen: Counter[int] = Counter()  # tokens by site
        self.problem: str | None = None  # raised after the replay, when no other worker waits

    @property
    def sites(self) -> frozenset[int]:
        """The indices of the edited sites."""
        return frozenset(self._masks)

    def sources(
        self, index: int, sources: Sequence[Tensor], positions: Sequence[int] | np.ndarray
    ) -> list[Tensor]:
        """The sources ``[T, d]`` of a site under the edits; replaced ones are float32."""
        edited, places = list(sources), np.minimum(positions, self._end)
        for edit, (column,), is_edited in self._replacing.get(index, ()):
            chosen = is_edited[places].nonzero()[0]
            vectors = np.frombuffer(edit.vectors, np.float32).reshape(-1, sources[0].shape[-1])
            # One vector for each token of the edit, or one for all of them.
            vectors = vectors[(is_edited.cumsum() - 1)[places[chosen]] % len(vectors)]
            edited[column] = edited[column].float().clone()
            edited[column][chosen] = torch.from_numpy(vectors).to(edited[column].device)
        return edited

    def weights(
        self,
        index: int,
        sources: Sequence[Tensor],
        site: SiteWeights,
        positions: Sequence[int] | np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """The weights of a site without and with its edits, ``[T, n]`` float32 each.

        Args:
            index: index of the site.
            sources: ``n`` tensors ``[T, d]``, the result of ``sources``.
            site: the site's parameters.
            positions: the ``T`` positions of the tokens in the sequence.
        """
        logits = _logits(sources, site)
        unedited, edited = logits.softmax(-1), logits.double()
        places = np.minimum(positions, self._end)
        for edit, columns, is_edited in self._edits.get(index, ()):
            chosen = is_edited[places].nonzero()[0]
            if len(chosen):
                rows = torch.from_numpy(chosen).to(edited.device)
                edited[rows] = _edited(edited[rows], edit, columns)
        changed = (edited != logits).any(-1, keepdim=True)
        weights = edited.softmax(-1).float().where(changed, unedited)
        if self.problem is None and not bool((unedited + weights).isfinite().all()):
            self.problem = f"the weights of site {index} are not numbers, so there is no trace."
        return unedited, weights

    def __call__(self, norm: SiteNorm, arguments: tuple, output):
        sources, normed = sources_of(norm, arguments, output)
        index, tokens = norm.site.index, len(normed)
        begin = self._seen[index]
        self._seen[index] += tokens
        rows = self._rows(index, begin, begin + tokens)
        result = normed.clone()
        for at in range(0, len(rows), TOKENS_AT_ONCE):
            places = rows[at : at + TOKENS_AT_ONCE]
            chosen = torch.from_numpy(places - begin).to(normed.device)
            unedited, site = [source[chosen] for source in sources], norm.site_weights()
            read = self.sources(index, unedited, places)
            before, after = self.weights(index, read, site, places)
            changed = (before != after).any(-1)
            for one, other in zip(unedited, read, strict=True):
                changed |= (one != other).any(-1)
            mixed = reference.weighted(torch.stack(read, dim=1).float(), after)
            edited = reference.rms_norm(mixed, site.norm_weight, site.norm_eps)
            result[chosen[changed]] = edited[changed].to(normed.dtype)
        return result if isinstance(output, Tensor) else (result, output[1])

    def _rows(self, index: int, begin: int, end: int) -> np.ndarray:
        """The edited positions of a site from ``begin`` to before ``end``."""
        return self._masks[index][begin:end].nonzero()[0] + begin


def _logits(sources: Sequence[Tensor], site: SiteWeights) -> Tensor:
    """The logits of the sources, ``[T, n]`` float32; minus infinity for masked sources."""
    stacked = torch.stack(tuple(sources), dim=-2).float()
    logits = reference.scores(stacked, folded(site), site.key_eps)
    if site.bias is not None:
        logits = (logits + site.bias).masked_fill(site.bias <= MASKED, -torch.inf)
    return logits


def _edited(logits: Tensor, edit: Resolved, columns: list[int]) -> Tensor:
    """The logits ``[T, n]`` float64 after one edit; minus infinity gives a source no weight."""
    if edit.kind == "mask":
        result = logits.clone()
        result[:, columns] = -torch.inf
        return result
    if edit.kind == "scale":
        result = logits.clone()
        scaled = result[:, columns] * edit.values[0]
        result[:, columns] = scaled.where(result[:, columns].isfinite(), -torch.inf)
        return result
    result = torch.full_like(logits, -torch.inf)
    shares = edit.values or [1.0] * len(columns)
    result[:, columns] = torch.tensor(shares, dtype=logits.dtype, device=logits.device).log()
    return result
