"""Lets the sites of a replay read what edits say, for the tokens that they name.

The depth state of a site holds its sources, whatever the algorithm and the backend; what it gives
is the normed mix of them.  So an edit is a forward hook that computes that mix anew, by the
specification, ``kernels.reference``.  A row whose weights an edit does not change is the site's own
to the bit.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attnres_serve.inspect.edits import Resolved
from attnres_serve.inspect.listen import TOKENS_AT_ONCE, sources_of
from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.model.site_norm import SiteNorm


class Intervention:
    """A forward hook of the sites that are edited.

    Args:
        edits: as ``edits.resolve`` gives them, in the order in which they are applied.
    """

    def __init__(self, edits: Iterable[Resolved]) -> None:
        self._edits: dict[int, list[tuple[Resolved, list[int]]]] = defaultdict(list)
        for edit in edits:
            for index, columns in edit.sites:
                self._edits[index].append((edit, columns))
        self._seen: Counter[int] = Counter()  # tokens by site

    @property
    def sites(self) -> frozenset[int]:
        """The indices of the sites that it changes."""
        return frozenset(self._edits)

    def weights(
        self, index: int, sources: Sequence[Tensor], site: SiteWeights, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The weights of a site without and with its edits, ``[T, n]`` float32 each.

        Args:
            index: of the site.
            sources: ``n`` tensors ``[T, d]``.
            site: what the site has learned.
            positions: ``T``, of the tokens in the sequence.
        """
        own = _logits(sources, site)
        edited = own.clone()
        places = torch.tensor(positions, device=own.device)
        for edit, columns in self._edits.get(index, ()):
            rows = torch.zeros_like(places, dtype=torch.bool)
            for begin, end in edit.runs:
                rows |= (places >= begin) & (places < end)
            edited[rows] = _edited(edited[rows], edit, columns)
        return own.softmax(-1), edited.softmax(-1)

    def __call__(self, norm: SiteNorm, arguments: tuple, output):
        sources, normed = sources_of(norm, arguments, output)
        index, tokens = norm.site.index, len(normed)
        begin = self._seen[index]
        self._seen[index] += tokens
        rows = self._rows(index, begin, begin + tokens)
        result = normed.clone()
        for at in range(0, len(rows), TOKENS_AT_ONCE):
            places = rows[at : at + TOKENS_AT_ONCE]
            chosen = torch.tensor(places, device=normed.device) - begin
            own, site = [source[chosen] for source in sources], norm.site_weights()
            before, after = self.weights(index, own, site, places)
            changed = (before != after).any(-1)
            stacked = torch.stack(own, dim=-2).float()
            mixed = (after.unsqueeze(-1) * stacked).sum(-2)
            wanted = reference.rms_norm(mixed, site.norm_weight, site.norm_eps)
            result[chosen[changed]] = wanted[changed].to(normed.dtype)
        return result if isinstance(output, Tensor) else (result, output[1])

    def _rows(self, index: int, begin: int, end: int) -> list[int]:
        """The positions from ``begin`` to before ``end`` at which a site is edited."""
        runs = [run for edit, _ in self._edits[index] for run in edit.runs]
        return sorted({at for low, high in runs for at in range(max(low, begin), min(high, end))})


def _logits(sources: Sequence[Tensor], site: SiteWeights) -> Tensor:
    """The logits of the sources, ``[T, n]`` float32."""
    stacked = torch.stack(tuple(sources), dim=-2).float()
    folded = site.query * site.key_norm * site.logit_scale
    found = reference.scores(stacked, folded, site.key_eps)
    if site.bias is not None:
        found[..., -1] += site.bias.float()
    return found


def _edited(logits: Tensor, edit: Resolved, columns: list[int]) -> Tensor:
    """The logits ``[T, n]`` after one edit; a source without weight has minus infinity."""
    if edit.kind == "ban":
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
    result[:, columns] = torch.tensor(shares, device=logits.device).log()
    return result
