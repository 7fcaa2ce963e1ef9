"""A token among others, in every Triton kernel: whatever they hold, how far away, in any order."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import DTYPES, KEY_EPS, NORM_EPS
from torch import Tensor
from triton_interpreter import DEVICE, ON_GPU, bits

from attnres_serve.kernels.triton import answers
from attnres_serve.kernels.triton import phase_1 as phase_1_module
from attnres_serve.kernels.triton.answers import GroupConfig
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.phase_1 import Least, phase_1
from attnres_serve.kernels.triton.phase_2 import phase_2
from attnres_serve.kernels.triton.single_pass import single_pass

pytestmark = pytest.mark.usefixtures("interpreter")

HIDDEN, SITES = 65, 2
ONE = {MAX_HIDDEN: GroupConfig(sites=1, num_warps=1)}  # of a program's turn: two of them here
Written = dict[str, tuple[Tensor, ...]]


def _inputs(dtype: torch.dtype, tokens: int, slots: int) -> tuple[Tensor, ...]:
    """Delta, bank, queries and norm weight."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    activations = draw(tokens, HIDDEN).to(dtype), draw(tokens, slots, HIDDEN).to(dtype)
    return *activations, draw(SITES, HIDDEN), draw(HIDDEN).to(dtype)


def _launch_all(
    delta: Tensor,
    bank: Tensor,
    queries: Tensor,
    weight: Tensor,
    place: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Written:
    """What each kernel writes, tokens first; the bank's last row is the partial sum.

    Args:
        delta, bank, queries, weight: as the kernels take them.
        place: copies a tensor to where a launch finds it.
    """
    hidden, row = delta.shape[1], bank.shape[1] - 1
    queries = place(queries)
    written: Written = {}

    def site(name: str, function: Callable, *known: object, **options: object) -> None:
        own, eps = place(bank), {"key_eps": KEY_EPS, "norm_eps": NORM_EPS}
        arguments = place(delta), own, *known, weight
        found = function(*arguments, row=row, fresh=False, **eps, **options)
        written[name] = own, *(found if isinstance(found, tuple) else (found,))

    site("single_pass", single_pass, queries[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "GROUP_CONFIGS", ONE)
        site("phase_1", phase_1, queries, completes=True)
        # As many tokens, where these are bfloat16.
        patch.setattr(phase_1_module, "LEAST", {hidden: Least(logits=1, sites=1)})
        site("phase_1, many", phase_1, queries, completes=True)
    *_, vectors, sums = written["phase_1, many"]
    # Twice, so that the second site's stand behind another's.
    known = place(vectors.repeat(2, 1, 1)), place(sums.repeat(2, 1)[..., None])[..., 0]
    site("phase_2", phase_2, *known, queries[1], position=1, first=row - 1)

    for name in ("phase_1", "phase_1, many"):
        *others, vectors, sums = written[name]
        written[name] = *others, vectors.transpose(0, 1), sums.t()
    return written


def _same(found: Written, wanted: Written, chosen: slice = slice(None)) -> None:
    """Bit for bit, of the chosen tokens."""
    for name, tensors in wanted.items():
        for one, other in zip(found[name], tensors, strict=True):
            assert torch.equal(bits(one[chosen]), bits(other)), name


# NumPy, which Triton's interpreter computes with, says what it makes of the values of padding.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy")
@pytest.mark.parametrize(
    ("value", "dtype"), [*zip((torch.nan, torch.inf, -6e4), DTYPES, strict=True)], ids=str
)
def test_padding_does_not_reach_a_token(value: float, dtype: torch.dtype) -> None:
    """As CUDA graphs pad a batch: a token gets the bits that it gets alone."""
    delta, bank, *site = _inputs(dtype, tokens=5, slots=5)
    token = slice(2, 3)
    alone = _launch_all(delta[token], bank[token], *site)
    for tensor in (delta, bank):
        tensor[:2] = tensor[3:] = value
    _same(_launch_all(delta, bank, *site), alone, token)


@pytest.mark.skipif(ON_GPU, reason="only the host maps memory where it is touched")
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_may_be_far_apart(axis: int) -> None:
    """With offsets beyond 2^31, of tokens, slots and sites, the bits are those of dense tensors."""

    def place(tensor: Tensor) -> Tensor:
        """Of eight GiB at most; memory that is never touched costs nothing."""
        strides = list(tensor.stride())
        strides[min(axis, tensor.dim() - 2)] = 2**31 + 64
        reach = sum(s * (n - 1) for s, n in zip(strides, tensor.shape, strict=True))
        far = torch.empty(reach + 1, dtype=tensor.dtype)
        return far.as_strided(tensor.shape, strides).copy_(tensor)

    inputs = _inputs(torch.bfloat16, tokens=2, slots=3)
    _same(_launch_all(*inputs, place=place), _launch_all(*inputs))


@pytest.mark.skipif(ON_GPU, reason="a GPU has no order of its programs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_may_run_in_any_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program of a launch writes, no other reads: the last one first, the same bits."""
    from triton.runtime.interpreter import InterpreterBuilder

    inputs = _inputs(dtype, tokens=3, slots=4)
    forwards, ran = _launch_all(*inputs), []
    choose = InterpreterBuilder.set_grid_idx

    def from_the_end(self: InterpreterBuilder, *index: int) -> None:
        ran.append(self.grid_dim)
        choose(self, *(size - 1 - at for size, at in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", from_the_end)
    _same(_launch_all(*inputs), forwards)
    assert (3, 2, 1) in ran  # two turns of a token, side by side
