"""Experts with Kimi K3's activation, in C++ and in torch, against the definition."""

import pytest
import torch
from torch import Tensor

from attnres_serve.kernels.cpp import backend as cpp
from attnres_serve.kernels.experts import situ_experts

# Tokens, experts, experts of a token, latent, width: alone, odd, of whole steps and with a tail.
SIZES = [
    (1, 4, 1, 8, 4),
    (7, 5, 4, 6, 10),
    (40, 3, 2, 32, 16),
    (33, 9, 3, 100, 70),
    (2, 2, 1, 64, 448),
]


@pytest.fixture(params=["C++", "torch"])
def ready(request, monkeypatch: pytest.MonkeyPatch) -> None:
    cpp.prepare()
    monkeypatch.setattr(cpp, "_ready", request.param == "C++")


def drawn(tokens: int, experts: int, top_k: int, latent: int, width: int) -> list[Tensor]:
    """Latents, weights of experts, their shares and numbers; the last expert is nobody's.

    Tokens differ in size, up to where the activation is at its bounds and down to where it is none.
    """
    draw = torch.Generator().manual_seed(tokens)
    shapes = (tokens, latent), (experts, 2 * width, latent), (experts, latent, width)
    x, *matrices = [torch.randn(shape, generator=draw).double() for shape in shapes]
    x *= 10 ** torch.linspace(-4, 2, tokens)[:, None]
    ids = torch.rand(tokens, experts - 1, generator=draw).argsort()[:, :top_k]
    return [x, *matrices, torch.rand(tokens, top_k, generator=draw).double(), ids]


def one_by_one(
    x: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, ids: Tensor, beta, clip
) -> Tensor:
    """The definition, a token and an expert at a time."""
    out = torch.zeros_like(x)
    for token, place in torch.ones_like(ids).nonzero().tolist():
        if (expert := int(ids[token, place])) >= 0:
            g, u = (gate_up[expert] @ x[token]).chunk(2)
            u = u if clip is None else clip * (u / clip).tanh()
            hidden = beta * (g / beta).tanh() * g.sigmoid() * u
            out[token] += shares[token, place] * (down[expert] @ hidden)
    return out


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("beta", "clip"), [(4.0, 25.0), (0.5, None), (1.0, 0.25)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_token_has_its_own_experts(sizes, beta, clip, dtype) -> None:
    x, gate_up, down, shares, ids = drawn(*sizes)
    ids[0, 0] = -1
    given = [tensor.to(dtype) for tensor in (x, gate_up, down)]
    found = situ_experts(*given, shares.float(), ids, beta, clip)
    wanted = one_by_one(*(tensor.double() for tensor in given), shares, ids, beta, clip)
    assert found.dtype == torch.float32
    # Two sums of up to 448 products in float32, with 0.4 sqrt(448) roundings of 2^-24 each, and the
    # activation between them: 2e-6.  Five times that is allowed.
    off = (found - wanted).norm(dim=1)
    assert bool((off <= 1e-5 * wanted.norm(dim=1)).all())


X, IDS, SHARES = torch.zeros(3, 5), torch.zeros(3, 2).long(), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(3, 4)}, "do not fit"),
        ({"shares": torch.zeros(2, 2)}, "do not fit"),
        ({"down": torch.zeros(2, 5, 6)}, "do not fit"),
        ({"x": X.bfloat16()}, "weights of their tokens' type"),
        ({"ids": IDS.int()}, "int64 numbers"),
        ({"gate_up": torch.zeros(2, 5, 8).mT}, "contiguous"),
        ({"ids": IDS + 2}, "no expert 2"),
        ({"ids": IDS - 2}, "no expert -2"),
        (
            {
                "x": X.long(),
                "gate_up": torch.zeros(2, 8, 5).long(),
                "down": torch.zeros(2, 5, 4).long(),
            },
            "takes float32",
        ),
    ],
    ids=str,
)
def test_what_would_be_misread_is_refused(change, said) -> None:
    """Nothing is read or written beyond an argument."""
    cpp.prepare()
    given = {"x": X, "gate_up": torch.zeros(2, 8, 5), "down": torch.zeros(2, 5, 4)}
    given |= {"shares": SHARES, "ids": IDS} | change
    out = torch.zeros(given["x"].shape)
    with pytest.raises(RuntimeError, match=said):
        torch.ops.attnres_serve.cpp_situ_experts(**given, beta=4.0, clip=0.0, out=out)
