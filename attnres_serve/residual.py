"""The site-aware norm: what takes the place of a decoder's RMSNorms.

vLLM's decoder layers pass ``hidden, residual`` from norm to norm.  Here ``residual`` is a depth
state: the finished blocks, the running partial sum and what is known ahead, for two-phase the
phase-1 answers of a group of sites, for score on write the logits of the blocks.  Between pipeline
stages it travels as one tensor ``[tokens, rows, hidden]``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm

from attnres_serve.bank_state import BankState
from attnres_serve.depth_state import DepthState
from attnres_serve.kernels.backends import SiteWeights
from attnres_serve.schedule import Site
from attnres_serve.settings import ALGORITHMS
from attnres_serve.spec import AttnResSpec

State = DepthState | BankState


class SiteOrderError(RuntimeError):
    """A decoder did not run its sites one after the other, so its numbers would be wrong."""


class SiteNorm(RMSNorm):
    """An RMSNorm that adds the sublayer's output to the depth state and norms the mix of sources.

    Args:
        norm: the RMSNorm whose place it takes; weight and eps are kept.
        site: its description.
        spec: the model's depth attention.
        algorithm: one of ``settings.ALGORITHMS``.
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
        self.state: type[State] = BankState if backend.IN_PLACE else DepthState
        self.bias: nn.Parameter | None = None
        if site.mixes:
            self.query = _parameter(norm.hidden_size)
            self.key_norm = _parameter(norm.hidden_size)
            if spec.recency_bias:
                self.bias = _parameter(1)
        self.group: list[SiteNorm] = []  # the sites that share a phase 1, this one among them
        self.position = 0  # of this site in its group
        self.ahead: list[SiteNorm] = []  # this site and the later ones of this pipeline stage
        self.slots = 0  # rows that a bank of this pipeline stage needs
        self.enters_stage = False  # the first site of a pipeline stage that is not the first stage
        self.leaves_stage = False  # the last site of a pipeline stage that is not the last stage
        self.executed: Tensor | None
        self.register_buffer("executed", None, persistent=False)

    def count_passes(self) -> None:
        """Count forward passes here, by algorithm and by eager or compiled.

        The last site of a stage does.  The count is part of the graph: it says which algorithm's
        graph ran, also where that came from a cache.  (A group of two-phase that has one site is a
        single pass.)
        """
        self.executed = torch.zeros((len(ALGORITHMS), 2), dtype=torch.int64)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, site={self.site.index}, {self.algorithm}"

    def site_weights(self) -> SiteWeights:
        """What the backend needs of this site."""
        learned = self.query, self.key_norm, self.bias, self.weight
        return SiteWeights(*learned, self.logit_scale, self.key_eps, self.variance_epsilon)

    def forward(self, delta: Tensor, residual: Tensor | State | None = None):
        """Run the site.

        Args:
            delta: output of the previous sublayer, ``[tokens, hidden]``; the token embedding at
                site 0.  It may be written over.
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
        normed, state = state.step(self, delta)
        if self.executed is not None and _record is None:
            self.executed[ALGORITHMS.index(self.algorithm), int(torch.compiler.is_compiling())] += 1
        return normed, state.pack() if self.leaves_stage else state

    def _receive(self, residual: Tensor | State) -> State:
        previous = self.site.index - 1
        if isinstance(residual, self.state) and residual.site == previous:
            return residual
        if isinstance(residual, Tensor) and residual.dim() == 2 and previous == 0:
            return self.state.begin(self, residual)
        if isinstance(residual, Tensor) and residual.dim() == 3 and self.enters_stage:
            return self.state.unpack(self, residual)
        found = "a plain residual" if isinstance(residual, Tensor) else f"site {residual.site}"
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
