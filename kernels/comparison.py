"""One comparison of a backend with the reference, on the device that is to serve.

No test may have run with this compiler or device, and wrong kernels would show only in wrong
answers.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import BankBackend, BankSlot, SiteWeights, slot_of

TOKENS, SITES = 5, 16
BLOCKS = 3  # the first site completes the last of them, the second begins another
EPS = 1e-6
# Of the largest value.  Rounding to the dtype, of an answer and of the result, takes less than four
# units; in float32 the rounding of logits does, which are sums over the hidden size.
UNITS, LEAST = 8, 1e-4


def difference(
    backend: BankBackend, hidden: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Run a few sites by every algorithm on random numbers and compare.

    Args:
        backend: ready to run.
        hidden: hidden size of the model.
        dtype: of its activations.
        device: where it runs.

    Returns:
        What differs from the reference in float64, in one clause; None if nothing does.
    """
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        # vLLM makes models with another default dtype and device.
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    blocks, deltas = (random(count, TOKENS, hidden).to(device, dtype) for count in (BLOCKS, SITES))
    sites = [
        SiteWeights(
            query=(2 * random(hidden) / hidden**0.5).to(device),
            key_norm=(1 + random(hidden) / 4).to(device),
            bias=random(BLOCKS + (number > 0)).to(device),
            norm_weight=(1 + random(hidden) / 4).to(device, dtype),
            logit_scale=1.0,
            key_eps=EPS,
            norm_eps=EPS,
        )
        for number in range(SITES)
    ]
    expected, sums = _by_reference(blocks, deltas, sites)
    bound = max(UNITS * torch.finfo(dtype).eps, LEAST) * float(expected.abs().max())
    for name, copies in runs_of(hidden, dtype, device):
        tokens = copies * TOKENS
        bank = torch.full((tokens, BLOCKS + 2, hidden), torch.nan, dtype=dtype, device=device)
        bank[:, :BLOCKS] = blocks.transpose(0, 1).repeat(copies, 1, 1)
        # A backend may write over a sublayer's output.
        results = ALGORITHMS[name](backend, deltas.repeat(1, copies, 1), bank, sites)
        at = (
            f"by {name.replace('_', ' ')} of {hidden} values in {str(dtype).removeprefix('torch.')}"
            f"{f' with {tokens} tokens' if copies > 1 else ''}"
        )
        for one, reference_mix in zip(results, expected, strict=True):
            off = one.float().unflatten(0, (copies, TOKENS)).sub_(reference_mix.float())
            worst = float(off.abs_().nan_to_num_(torch.inf).max())
            if worst > bound:
                return f"a site {at} is off by {worst:.2g}, where {bound:.2g} is allowed"
        if not torch.equal(bank[:, BLOCKS - 1 : BLOCKS + 1], sums.repeat(copies, 1, 1)):
            return f"a partial sum {at} is not the reference's"
    return None


def runs_of(hidden: int, dtype: torch.dtype, device: torch.device) -> list[tuple[str, int]]:
    """Algorithms, and how many copies of the tokens each runs with.

    Triton's have other configs and kernels for more tokens.  Groups of more sites have others yet,
    which are not compared: most models would have them compiled for nothing else.
    """
    runs = [(name, 1) for name in ALGORITHMS]
    if device.type == "cuda":
        # The config of many tokens, and programs that take a token's turns one after the other.
        some = (512 if hidden <= 1024 else 128) // TOKENS + 1
        runs += [("single_pass", some), ("two_phase", some)]
        if dtype == torch.bfloat16:  # a group by tensor cores
            runs.append(("two_phase", (8192 if hidden <= 2048 else 2048) // TOKENS + 1))
    return runs


def _by_reference(
    blocks: Tensor, deltas: Tensor, sites: list[SiteWeights]
) -> tuple[Tensor, Tensor]:
    """The normed mixes ``[S, T, d]`` in float64; the completed block and the sum begun after it."""
    *finished, last = blocks
    partial: Tensor | None = last
    mixes = []
    for number, (delta, site) in enumerate(zip(deltas, sites, strict=True)):
        if number == 1:
            finished, partial = [*finished, cast("Tensor", partial)], None
        query = site.query * site.key_norm * site.logit_scale
        normed, partial = reference.site(
            delta,
            partial,
            finished,
            query,
            site.norm_weight,
            site.key_eps,
            site.norm_eps,
            torch.float64,
            site.bias,
        )
        mixes.append(normed)
    assert partial is not None
    return torch.stack(mixes), torch.stack((finished[-1], partial), 1)


def _slot(number: int) -> BankSlot:
    if number == 0:
        return slot_of(BLOCKS - 1, fresh=False)
    return slot_of(BLOCKS, fresh=number == 1, position=number, first=BLOCKS, number=number - 1)


def _single_pass(
    backend: BankBackend, deltas: Tensor, bank: Tensor, sites: list[SiteWeights]
) -> Iterator[Tensor]:
    queries = backend.queries_of(sites)
    for number, site in enumerate(sites):
        yield backend.single_pass(deltas[number], bank, queries, site, _slot(number))


def _two_phase(
    backend: BankBackend, deltas: Tensor, bank: Tensor, sites: list[SiteWeights]
) -> Iterator[Tensor]:
    queries = backend.queries_of(sites)
    normed, answers = backend.phase_1(
        deltas[0], bank, queries, len(sites), sites[0], _slot(0), True
    )
    yield normed
    for number, site in enumerate(sites[1:], 1):
        yield backend.phase_2(deltas[number], bank, answers, queries, site, _slot(number))


Algorithm = Callable[[BankBackend, Tensor, Tensor, list[SiteWeights]], Iterator[Tensor]]
ALGORITHMS: dict[str, Algorithm] = {
    "single_pass": _single_pass,
    "two_phase": _two_phase,
}
