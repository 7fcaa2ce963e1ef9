"""The site-aware norm, which replaces a decoder's RMSNorms.

vLLM's decoder layers pass ``hidden, residual`` from norm to norm.  Here ``residual`` is a depth
state: the finished blocks, the running partial sum and, for two-phase, the phase-1 answers of a
group of sites. Between pipeline stages it is sent as one tensor ``[tokens, rows, hidden]``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.utils import set_weight_attrs

from attnres_serve.compat import decoder
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.kernels.torch import functions as torch_functions
from attnres_serve.model.bank_state import BankState
from attnres_serve.model.site_context import SiteContext
from attnres_serve.model.tensor_state import DepthState
from attnres_serve.settings import ALGORITHMS, MIXED

State = DepthState | BankState


class SiteOrderError(RuntimeError):
    """A decoder did not run its sites in order, so its results would be wrong."""


class SiteNorm(RMSNorm):
    """An RMSNorm that adds the sublayer's output to the depth state and norms the mix of sources.

    Args:
        norm: the RMSNorm that it replaces; weight and eps are kept.  A GemmaRMSNorm stores w for a
            weight of 1 + w.
        context: its place in the pipeline stage.
        spec: the model's depth attention.
        later: the later mixing sites of the stage, in order.

    Parameters: ``query`` and ``key_norm``, ``[hidden]`` float32, and in a model with biases
    ``bias``, ``[sources]`` float32, of which a recency bias uses only the last.  They are not
    Linear weights, so that no quantiser or LoRA wrapper touches them.
    """

    def __init__(
        self,
        norm: RMSNorm | GemmaRMSNorm,
        context: SiteContext[Any],
        spec: AttnResSpec,
        later: tuple["SiteNorm", ...],
    ) -> None:
        hidden = norm.weight.numel()
        super().__init__(hidden, eps=norm.variance_epsilon)
        self.weight = norm.weight
        self.adds_one = decoder.adds_one(norm)
        self.context = context
        self.site = context.site
        self.ahead = (self, *later)
        self.key_eps = spec.key_norm_eps
        self.logit_scale = spec.logit_scale
        self.state: type[State] = BankState if context.backend.IN_PLACE else DepthState
        self.bias: nn.Parameter | None = None
        if self.site.mixes:
            self.query = _parameter(hidden)
            self.key_norm = _parameter(hidden)
            # As vLLM's norms do since 0.33, for random weights (load format dummy).
            set_weight_attrs(self.key_norm, {"dummy_weight_value": 1.0})
            if spec.has_biases:
                self.bias = _parameter(self.site.num_sources)
                self.bias.data.zero_()  # only edits may fill it
        self.executed: Tensor | None
        self.register_buffer("executed", None, persistent=False)
        self.mixed: Tensor | None
        self.register_buffer("mixed", None, persistent=False)

    def keep_mix(self, tokens: int) -> None:
        """Write the input of the norm here to ``mixed``, ``[tokens, hidden]``, in every pass.

        A compiled graph has no other way to return it.
        """
        self.mixed = self.weight.new_zeros((tokens, self.weight.numel()))

    def stream(self, kind: str, delta: Tensor, state: State) -> Tensor:
        """The hidden states before this site for a draft head, ``[tokens, hidden]``.

        Standard residuals have one hidden state there.  Here there are two.

        Args:
            kind: ``partial``, the running sum of the block, or ``mixed``, the input of the norm
                here.
            delta: output of the sublayer before, as the site receives it; it is not modified.
            state: the state from the site before.
        """
        site, sources = self.site, state.sources()
        done = site.num_blocks - site.opens_block
        blocks, partial = sources[:done], sources[done:]
        total = partial[0] + delta if partial else delta.clone()
        if kind != MIXED or not site.mixes:
            return total
        weights = self.site_weights()
        query = weights.query * weights.key_norm * weights.logit_scale
        goes_on = site.cumulative and site.opens_block
        sums = (total, total) if goes_on else (total,)
        mixed = torch_functions.mix((*blocks, *sums), query, weights.key_eps, weights.bias)
        return mixed.to(delta.dtype)

    def whole_delta(self, delta: Tensor) -> Tensor:
        """The sum of ``delta`` over workers; all workers have to call this together."""
        return delta

    def count_passes(self) -> None:
        """Count forward passes here, by algorithm and by eager or compiled.

        The last site of a stage does.  The count is part of the graph: it shows which algorithm's
        graph ran, even if the graph came from a cache.  (A two-phase group of one site is a single
        pass.)
        """
        self.executed = torch.zeros((len(ALGORITHMS), 2), dtype=torch.int64)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, site={self.site.index}, {self.context.algorithm}"

    def norm_weight(self) -> Tensor:
        """The factors ``[hidden]`` of the norm: 1 + w in float32, or w in the parameter's dtype.

        They are computed in every pass, so that weights updated in place take effect.
        """
        return self.weight.float() + 1 if self.adds_one else self.weight

    def site_weights(self) -> SiteWeights:
        """The site's parameters as arguments of the backend's functions."""
        learned = self.query, self.key_norm, self.bias, self.norm_weight()
        return SiteWeights(*learned, self.logit_scale, self.key_eps, self.variance_epsilon)

    def forward(
        self, delta: Tensor, residual: Tensor | State | None = None
    ) -> Tensor | tuple[Tensor, Tensor | State]:
        """Run the site.

        Args:
            delta: output of the previous sublayer, ``[tokens, hidden]``; the token embedding at
                site 0.  It may be overwritten.
            residual: the state; None at site 0, the embedding at site 1, the packed state
                ``[tokens, rows, hidden]`` at the first site of a later pipeline stage.

        Returns:
            The normed mix and the new state; at site 0 the normed embedding alone.

        Raises:
            SiteOrderError: the site before this one did not run.
        """
        if residual is None:
            if _record is not None:
                _record.append(self.site.index)
            return self._norm_embedding(delta)  # one source: the mix is the embedding itself
        result = self.run(delta, residual)
        self.count()
        return result

    def run(self, delta: Tensor, residual: Tensor | State) -> tuple[Tensor, Tensor | State]:
        """Run a site after the first one, without counting the pass; see ``forward``."""
        state = self.receive(residual)
        if _record is not None:
            _record.append(self.site.index)
        context = self.context
        if self.mixed is not None:  # before the bank is written
            self.mixed[: delta.shape[0]] = self.stream(MIXED, delta, state)
        if self.site.mixes:
            normed, state = state.step(context, self.ahead, delta)
        else:
            updated, state = state.add_last(context, delta)
            normed = self._rms_norm(updated)
        return normed, state.pack() if context.leaves_stage else state

    def count(self) -> None:
        """Count the pass, if this site counts passes."""
        if self.executed is not None and _record is None:
            compiled = int(torch.compiler.is_compiling())
            self.executed[ALGORITHMS.index(self.context.algorithm), compiled] += 1

    def _norm_embedding(self, embedding: Tensor) -> Tensor:
        return self._rms_norm(embedding) if self.adds_one else super().forward(embedding)

    def _rms_norm(self, x: Tensor) -> Tensor:
        return torch_functions.rms_norm(x, self.norm_weight(), self.variance_epsilon)

    def receive(self, residual: Tensor | State) -> State:
        """The state from the residual that the site before this one returned.

        Raises:
            SiteOrderError: another site returned it.
        """
        previous = self.site.index - 1
        if isinstance(residual, self.state) and residual.site == previous:
            return residual
        if isinstance(residual, Tensor) and residual.dim() == 2 and previous == 0:
            return self.state.begin(self.context, residual)
        if isinstance(residual, Tensor) and residual.dim() == 3 and self.context.enters_stage:
            return self.state.unpack(self.context, residual)
        sender = "a plain residual" if isinstance(residual, Tensor) else f"site {residual.site}"
        raise SiteOrderError(
            f"site {previous + 1} was run after {sender} instead of after site {previous}: "
            "a decoder layer left out a site."
        )


def _parameter(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


_record: list[int] | None = None


@contextmanager
def recorded_sites() -> Iterator[list[int]]:
    """Collect the indices of the sites that run inside the ``with`` block."""
    global _record
    _record = []
    try:
        yield _record
    finally:
        _record = None
