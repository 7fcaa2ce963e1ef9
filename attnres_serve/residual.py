"""The site-aware norm: what takes the place of a decoder's RMSNorms.

vLLM's decoder layers pass ``hidden, residual`` from norm to norm.  Here ``residual`` is a
``DepthState``: the finished blocks, the running partial sum and, for two-phase, the phase-1 answers
of the sites ahead.  Between pipeline stages it travels as one tensor ``[tokens, rows, hidden]``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm

from attnres_serve.kernels import torch_path
from attnres_serve.kernels.backends import SiteWeights
from attnres_serve.schedule import Site
from attnres_serve.settings import ALGORITHMS
from attnres_serve.spec import AttnResSpec

Blocks = tuple[Tensor, ...]


class Answers(NamedTuple):
    """Phase 1 of an open block.

    Attributes:
        site: index of its first site.
        values: what the backend made of it.
    """

    site: int
    values: Any


class DepthState(NamedTuple):
    """What a site hands on.

    Attributes:
        site: index of the site that made it.
        blocks: finished blocks, each ``[tokens, hidden]``, the embedding first.
        partial: running partial sum ``[tokens, hidden]``, None where it has just begun anew.
        answers: phase 1 of the open block (two-phase only).
    """

    site: int
    blocks: Blocks
    partial: Tensor | None = None
    answers: Answers | None = None

    def add(self, delta: Tensor) -> Tensor:
        """The partial sum with a sublayer's output, ``[tokens, hidden]``."""
        return delta if self.partial is None else self.partial + delta


class SiteOrderError(RuntimeError):
    """A decoder did not run its sites one after the other, so its numbers would be wrong."""


class SiteNorm(RMSNorm):
    """An RMSNorm that adds the sublayer's output to the depth state and norms the mix of sources.

    Args:
        norm: the RMSNorm whose place it takes; weight and eps are kept.
        site: its description.
        spec: the model's depth attention.
        algorithm: ``single_pass`` or ``two_phase``.
        backend: what computes it, see ``kernels.backends``.

    Parameters: ``query`` and ``key_norm``, ``[hidden]`` float32, and with a recency bias ``bias``,
    ``[1]`` float32.  They are not Linear weights, so that no quantiser or LoRA wrapper touches
    them.
    """

    def __init__(
        self, norm: RMSNorm, site: Site, spec: AttnResSpec, algorithm: str, backend: ModuleType
    ) -> None:
        super().__init__(norm.hidden_size, eps=norm.variance_epsilon)
        self.weight = norm.weight
        self.site = site
        self.key_eps = spec.key_norm_eps
        self.logit_scale = spec.logit_scale
        self.algorithm = algorithm
        self.backend = backend
        self.bias: nn.Parameter | None = None
        if site.mixes:
            self.query = _parameter(norm.hidden_size)
            self.key_norm = _parameter(norm.hidden_size)
            if spec.recency_bias:
                self.bias = _parameter(1)
        self.group: list[SiteNorm] = []  # this site and the later ones that share its phase 1
        self.enters_stage = False  # the first site of a pipeline stage that is not the first stage
        self.leaves_stage = False  # the last site of a pipeline stage that is not the last stage
        self.executed: Tensor | None
        self.register_buffer("executed", None, persistent=False)

    def count_passes(self) -> None:
        """Count forward passes here, by algorithm and by eager or compiled.

        The last site of a stage does.  The count is part of the graph, so it says what ran, not
        what was asked for.
        """
        self.executed = torch.zeros((len(ALGORITHMS), 2), dtype=torch.int64)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, site={self.site.index}, {self.algorithm}"

    def site_weights(self) -> SiteWeights:
        """What the backend needs of this site."""
        key = self.query, self.key_norm, self.logit_scale, self.key_eps, self.bias
        return SiteWeights(*key, self.weight, self.variance_epsilon)

    def forward(self, delta: Tensor, residual: Tensor | DepthState | None = None):
        """Run the site.

        Args:
            delta: output of the previous sublayer, ``[tokens, hidden]``; the token embedding at
                site 0.
            residual: the state; None at site 0, the embedding at site 1, the packed state
                ``[tokens, rows, hidden]`` at the first site of a later pipeline stage.

        Returns:
            The normed mix and the new state; at site 0 the normed embedding alone.

        Raises:
            SiteOrderError: if the site before this one did not run.
        """
        if residual is None:
            self._record()
            return super().forward(delta)  # one source: the mix is the embedding itself
        state = self._receive(residual)
        self._record()
        opens = self.site.opens_block
        if opens and self.site.cumulative:  # the sum so far becomes a block, and goes on
            delta = state.add(delta)
            state, opens = DepthState(state.site, (*state.blocks, delta)), False
        normed, updated, answers = self._run(state, delta, opens)
        blocks, partial = ((*state.blocks, updated), None) if opens else (state.blocks, updated)
        if self.executed is not None and _record is None:
            self.executed[ALGORITHMS.index(self.algorithm), int(torch.compiler.is_compiling())] += 1
        if self.leaves_stage:
            rows = blocks if partial is None else (*blocks, partial)
            return normed, torch.stack(rows, dim=1)
        return normed, DepthState(self.site.index, blocks, partial, answers)

    def _run(
        self, state: DepthState, delta: Tensor, opens: bool
    ) -> tuple[Tensor, Tensor, Answers | None]:
        """The normed mix, the new partial sum and the phase 1 of the open block.

        ``opens``: the new sum is a block by itself, and nothing follows it.
        """
        if not self.site.mixes:
            updated = state.add(delta)
            norm = self.weight, self.variance_epsilon
            return torch_path.rms_norm(updated, *norm), updated, None
        weights = self.site_weights()
        # Phase 1 knows no bias, so where the last source is a block, the site attends on its own.
        if self.algorithm == "single_pass" or (opens and self.bias is not None):
            return *self.backend.single_pass(state.blocks, state.partial, delta, weights), None
        if opens:
            updated = state.add(delta)
            answers = self._phase_1((*state.blocks, updated))
            return self.backend.norm_answer(answers.values, 0, weights, delta), updated, answers
        answers = state.answers or self._phase_1(state.blocks)
        position = self.site.index - answers.site
        merged = self.backend.merge(answers.values, position, state.partial, delta, weights)
        return *merged, answers

    def _phase_1(self, blocks: Blocks) -> Answers:
        sites = [norm.site_weights() for norm in self.group]
        return Answers(self.site.index, self.backend.inter_block(blocks, sites))

    def _receive(self, residual: Tensor | DepthState) -> DepthState:
        previous = self.site.index - 1
        if isinstance(residual, DepthState) and residual.site == previous:
            return residual
        if isinstance(residual, Tensor) and residual.dim() == 2 and previous == 0:
            return DepthState(0, (residual,), residual if self.site.cumulative else None)
        if isinstance(residual, Tensor) and residual.dim() == 3 and self.enters_stage:
            rows = residual.unbind(dim=1)
            count = self.site.num_blocks - self.site.opens_block
            return DepthState(previous, rows[:count], rows[count] if rows[count:] else None)
        found = f"site {residual.site}" if isinstance(residual, DepthState) else "a plain residual"
        raise SiteOrderError(
            f"site {previous + 1} was run after {found} instead of after site {previous}: "
            "a decoder layer left out a site."
        )

    def _record(self) -> None:
        if _record is not None:
            _record.append(self.site.index)


def _parameter(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


_record: list[int] | None = None


@contextmanager
def recorded_sites() -> Iterator[list[int]]:
    """Collect the indices of the sites that run inside the block."""
    global _record
    _record = []
    try:
        yield _record
    finally:
        _record = None
