"""A decoder's sublayers with random weights, and the ways to connect them, without vLLM.

The sublayers are those of a Llama without rotary embedding: matrix products, SwiGLU, and SDPA over
a cache (decode) or causal (prefill).  What connects them is a ``Connection``: it makes the input of
every sublayer from the outputs of those before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from attnres_serve.kernels import traffic
from benchmarks.kernels.cells import NORM_EPS
from benchmarks.kernels.contenders import EPS, add_and_norm, compiled
from benchmarks.kernels.gate import Expected, excess, expected_site


@dataclass(frozen=True)
class Shape:
    """A decoder; ``block_size`` is in sublayers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    block_size: int

    @property
    def sublayers(self) -> int:
        return 2 * self.layers

    @property
    def parameters(self) -> int:
        """Number of parameters in the sublayers' matrices: no embedding, no head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


# Each with eight blocks.
SHAPES = {
    "8B": Shape(4096, 32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, block_size=8),
    "0.6B": Shape(1024, 28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, block_size=7),
}
TINY = {
    "tiny": Shape(32, 3, heads=4, kv_heads=2, head_dim=8, intermediate=48, block_size=2),
    "uneven": Shape(33, 3, heads=2, kv_heads=1, head_dim=16, intermediate=40, block_size=4),
}


class Phase(NamedTuple):
    """``batch`` sequences that each decode token ``context``, or one prompt of so many tokens."""

    name: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass."""
        return self.batch if self.name == "decode" else self.context


class Weights(NamedTuple):
    """Weights of all layers: matrices of the sublayers, then those of the sites.

    Attributes:
        qkv, out, up, down: one matrix per layer, as ``functional.linear`` takes it.
        queries, key_norms: ``[sites, d]`` float32; a site in front of each sublayer and a last one.
        norms: ``[sites, d]`` weights of the norms behind the sites.
    """

    qkv: list[Tensor]
    out: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]
    queries: Tensor
    key_norms: Tensor
    norms: Tensor


def draw_weights(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Random weights that keep activations near one."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrices(rows: int, columns: int) -> list[Tensor]:
        drawn = [
            torch.empty(rows, columns, device=device, dtype=dtype) for _ in range(shape.layers)
        ]
        return [one.normal_(std=columns**-0.5, generator=generator) for one in drawn]

    def vectors() -> Tensor:
        rows = shape.sublayers + 1, shape.hidden
        return torch.randn(rows, generator=generator, device=device)

    width = shape.heads * shape.head_dim
    return Weights(
        matrices(width + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        matrices(shape.hidden, width),
        matrices(2 * shape.intermediate, shape.hidden),
        matrices(shape.hidden, shape.intermediate),
        queries=2 * shape.hidden**-0.5 * vectors(),
        key_norms=1 + 0.1 * vectors(),
        norms=(1 + 0.1 * vectors()).to(dtype),
    )


def swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


class Sublayers:
    """The sublayers of a shape in a phase; decode writes to the caches, the same place each time.

    Args:
        shape: of the decoder.
        weights: of the decoder.
        phase: what a forward pass works on.
    """

    def __init__(self, shape: Shape, weights: Weights, phase: Phase) -> None:
        self.shape, self.weights, self.phase = shape, weights, phase
        self._swiglu = fused(swiglu, weights.norms)
        self._caches: list[Tensor] = []
        if phase.name == "decode":
            rows = 2, phase.batch, shape.kv_heads, phase.context, shape.head_dim
            caches = [weights.norms.new_empty(rows) for _ in range(shape.layers)]
            generator = torch.Generator(weights.norms.device).manual_seed(1)
            self._caches = [cache.normal_(generator=generator) for cache in caches]

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """The output ``[T, d]`` of sublayer ``index``: attention where it is even, else MLP."""
        layer = index // 2
        if index % 2:
            both = functional.linear(x, self.weights.up[layer])
            return functional.linear(self._swiglu(both), self.weights.down[layer])
        shape = self.shape
        heads = functional.linear(x, self.weights.qkv[layer])
        heads = heads.view(x.shape[0], -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if self.phase.name == "decode":
            keys, values = self._caches[layer]
            keys[:, :, -1], values[:, :, -1] = k, v
            mixed = _attend(q.unsqueeze(2), keys, values, causal=False)
        else:
            q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
            mixed = _attend(q, k, v, causal=True).transpose(1, 2)
        return functional.linear(mixed.reshape(x.shape[0], -1), self.weights.out[layer])


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def fused(function: Callable[..., Tensor], like: Tensor) -> Callable[..., Tensor]:
    """Compiled on a GPU, as a server has it; as it is on CPU, where only results are compared."""
    return compiled(function) if like.is_cuda else function


class Connection(Protocol):
    """Makes the sublayers' inputs."""

    def begin(self, embedded: Tensor) -> Tensor:
        """The input of the first sublayer, from the embedding ``[T, d]``."""

    def step(self, site: int, delta: Tensor) -> Tensor:
        """The input at site ``site``, from the output of the sublayer before it."""


class Residual:
    """Standard residuals: addition and RMSNorm in one compiled kernel."""

    def __init__(self, shape: Shape, weights: Weights, tokens: int) -> None:
        self._norms = weights.norms
        self._total = weights.norms.new_empty((tokens, shape.hidden))
        self._step = fused(add_and_norm, weights.norms)

    def begin(self, embedded: Tensor) -> Tensor:
        self._total.copy_(embedded)
        return _first_norm(embedded, self._norms)

    def step(self, site: int, delta: Tensor) -> Tensor:
        return self._step(delta, self._total, self._norms[site])


class SinglePass:
    """Block AttnRes, every site one Triton launch; queries are folded once a pass."""

    def __init__(self, shape: Shape, weights: Weights, tokens: int) -> None:
        self._shape, self._weights = shape, weights
        slots = 1 + -(-shape.sublayers // shape.block_size)
        self._bank = weights.norms.new_empty((tokens, slots, shape.hidden))

    def begin(self, embedded: Tensor) -> Tensor:
        self._bank[:, 0] = embedded
        self._queries = self._weights.queries * self._weights.key_norms
        return _first_norm(embedded, self._weights.norms)

    def step(self, site: int, delta: Tensor) -> Tensor:
        from attnres_serve.kernels.triton.single_pass import single_pass

        row, fresh, _ = _place(site, self._shape)
        own = self._queries[site], self._weights.norms[site]
        return single_pass(delta, self._bank, *own, row=row, fresh=fresh, **EPS)


class TwoPhase(SinglePass):
    """Block AttnRes, phase 1 in the launch of every block's first site and a merge at the later
    ones."""

    def step(self, site: int, delta: Tensor) -> Tensor:
        from attnres_serve.kernels.triton.open_group import open_group
        from attnres_serve.kernels.triton.two_phase import merge

        row, fresh, position = _place(site, self._shape)
        where = {"row": row, "fresh": fresh}
        norm = self._weights.norms[site]
        if opens := _opens(site, self._shape):
            group = self._queries[site : site + opens]
            completes = position == 0
            normed, *self._answers = open_group(
                delta, self._bank, group, norm, **where, completes=completes, **EPS
            )
            self._opened = site
            return normed
        known = *self._answers, self._queries[site], norm
        number = site - self._opened - 1
        return merge(delta, self._bank, *known, **where, position=number, **EPS)


class Reference:
    """Exact results of the sites of Block AttnRes, in float64, on separate tensors."""

    def __init__(self, shape: Shape, weights: Weights, embedded: Tensor) -> None:
        self._shape, self._weights = shape, weights
        self._sources = [embedded]

    def step(self, site: int, delta: Tensor) -> Expected:
        """The result at ``site``, from the output of the sublayer before it."""
        self._add(site, delta)
        query = self._weights.queries[site] * self._weights.key_norms[site]
        return expected_site(self._sources, query, self._weights.norms[site])

    def _add(self, site: int, delta: Tensor) -> None:
        if _place(site, self._shape)[1]:
            self._sources.append(delta)
        else:
            self._sources[-1] = self._sources[-1] + delta


class ReferenceResidual(Reference):
    """The same of standard residuals: one source, to which everything is added."""

    def _add(self, site: int, delta: Tensor) -> None:
        self._sources[-1] = self._sources[-1] + delta


def _place(site: int, shape: Shape) -> tuple[int, bool, int]:
    """The bank row that the output before a site belongs to, whether it begins that row, and which
    site of its block this is."""
    return (
        1 + (site - 1) // shape.block_size,
        (site - 1) % shape.block_size == 0,
        site % shape.block_size,
    )


def _opens(site: int, shape: Shape) -> int:
    """Number of sites of a phase 1 that begins at this one; 0 if none does.

    Site 0 has no mix, so the first group opens at site 1.
    """
    position = site % shape.block_size
    if site > 1 and position:
        return 0
    return min(shape.block_size - position, shape.sublayers + 1 - site)


def _first_norm(embedded: Tensor, norms: Tensor) -> Tensor:
    return functional.rms_norm(embedded, embedded.shape[-1:], norms[0], NORM_EPS)


class Way(NamedTuple):
    """A way to connect sublayers.

    Attributes:
        connection: makes a ``Connection``.
        reference: makes what it is compared with.
        roundings: to the activation dtype on the way, as in ``contenders.Contender``.
    """

    connection: Callable[[Shape, Weights, int], Connection]
    reference: type[Reference]
    roundings: int


def late(connection: type[SinglePass]) -> type[SinglePass]:
    """The same, but no launch of its sites starts early."""

    class Late(connection):  # type: ignore[misc, valid-type]
        def step(self, site: int, delta: Tensor) -> Tensor:
            from attnres_serve.kernels.triton import common

            common.forbid_early_launches(True)
            try:
                found: Tensor = super().step(site, delta)
                return found
            finally:
                common.forbid_early_launches(False)

    return Late


BASELINE = "residual"
WAYS = {
    BASELINE: Way(Residual, ReferenceResidual, 1),
    "single_pass": Way(SinglePass, Reference, 0),
    "two_phase": Way(TwoPhase, Reference, 1),
    "single_pass_late": Way(late(SinglePass), Reference, 0),
    "two_phase_late": Way(late(TwoPhase), Reference, 1),
}


def examine(
    sublayers: Sublayers, way: Way, connection: Connection, embedded: Tensor
) -> tuple[float, str]:
    """Compare every site of a pass with the reference.

    The sublayers go on from the reference's result, so that an error stays where it is made.

    Returns:
        The largest error in units of what it may be, and what is wrong, empty if nothing is.
    """
    reference = way.reference(sublayers.shape, sublayers.weights, embedded)
    x, worst = connection.begin(embedded), 0.0
    for index in range(sublayers.shape.sublayers):
        delta = sublayers(index, x)
        expected = reference.step(index + 1, delta)
        found = excess(connection.step(index + 1, delta), expected, way.roundings)
        if found > 1:
            return found, f"site {index + 1} is off by {found:.3g} times what it may be"
        worst = max(worst, found)
        x = expected.result.to(delta.dtype)
    return worst, ""


def forward(sublayers: Sublayers, connection: Connection, embedded: Tensor) -> Tensor:
    """A pass through all sublayers to what a head would get, ``[T, d]``."""
    x = connection.begin(embedded)
    for index in range(sublayers.shape.sublayers):
        x = connection.step(index + 1, sublayers(index, x))
    return x


def weight_and_cache_bytes(shape: Shape, phase: Phase, dtype: torch.dtype) -> int:
    """Bytes that a pass reads at least, whatever connects the sublayers."""
    size = shape.parameters
    if phase.name == "decode":
        rows = 2 * phase.batch * phase.context * shape.layers
        size += rows * shape.kv_heads * shape.head_dim
    return size * dtype.itemsize


def connection_bytes(name: str, shape: Shape, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that the sites of a pass read and write, by ``kernels/traffic.py``; without site 0."""
    hidden, total = shape.hidden, 0
    for site in range(1, shape.sublayers + 1):
        row, fresh, _ = _place(site, shape)
        what = {"hidden": hidden, "dtype": dtype, "fresh": fresh}
        if name == BASELINE:
            total += (4 * tokens + 1) * hidden * dtype.itemsize
        elif name.startswith("single_pass"):
            total += traffic.single_pass(tokens, row, **what)
        elif opens := _opens(site, shape):
            total += traffic.open_group(tokens, row, opens, **what)
        else:
            total += traffic.merge(tokens, **what)
    return total


def operations(shape: Shape, phase: Phase) -> int:
    """Multiplications and additions of the matrix products and of attention."""
    products = 2 * phase.tokens * shape.parameters
    pairs = phase.batch * phase.context
    if phase.name == "prefill":
        pairs = phase.context * (phase.context + 1) // 2
    return products + 4 * pairs * shape.heads * shape.head_dim * shape.layers
