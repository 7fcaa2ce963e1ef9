"""Experts with Kimi K3's activation: every token has its own."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from attnres_serve.model import situ_experts


def drawn(tokens: int, experts: int, top_k: int, latent: int, width: int) -> list[Tensor]:
    """Latents, weights of experts, their shares and numbers; the last expert is nobody's."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = (tokens, latent), (experts, 2 * width, latent), (experts, latent, width)
    given = [torch.randn(shape, generator=draw).double() for shape in shapes]
    ids = torch.rand(tokens, experts - 1, generator=draw).argsort()[:, :top_k]
    return [*given, torch.rand(tokens, top_k, generator=draw).double(), ids]


def one_by_one(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, beta, clip
) -> Tensor:
    """The definition, a token and an expert at a time."""
    out = torch.zeros_like(x)
    for token, place in torch.ones_like(ids).nonzero().tolist():
        if (expert := int(ids[token, place])) >= 0:
            g, u = (gate_up[expert] @ x[token]).chunk(2)
            u = u if clip is None else clip * (u / clip).tanh()
            hidden = beta * (g / beta).tanh() * g.sigmoid() * u
            out[token] += weights[token, place] * (down[expert] @ hidden)
    return out


SIZES = [(1, 4, 1, 8, 4), (7, 5, 4, 6, 10), (40, 3, 2, 32, 16)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("beta", "clip"), [(4.0, 25.0), (0.5, None), (1.0, 0.25)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_every_token_has_its_own_experts(sizes, beta, clip, dtype, bound) -> None:
    x, gate_up, down, weights, ids = drawn(*sizes)
    given = [tensor.to(dtype) for tensor in (x, gate_up, down)]
    found = situ_experts.mixture(*given, weights.float(), ids, beta, clip)
    wide = [tensor.double() for tensor in given]
    wanted = one_by_one(*wide, weights, ids, beta, clip)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_workers_add_up_to_all_experts(sizes) -> None:
    x, gate_up, down, weights, ids = (
        tensor.float() if tensor.is_floating_point() else tensor for tensor in drawn(*sizes)
    )
    whole = situ_experts.mixture(x, gate_up, down, weights, ids, 4.0, 25.0)
    parts = torch.zeros_like(whole)
    for chosen in ([0], [*range(1, len(down))]):
        local = torch.full((len(down),), -1)
        local[chosen] = torch.arange(len(chosen))
        experts = object.__new__(situ_experts.SituExperts)
        experts.moe_config = SimpleNamespace(
            activation_situ_beta=4.0, activation_situ_linear_beta=25.0
        )
        out = torch.empty_like(x)
        given = {"topk_weights": weights, "topk_ids": ids.int(), "expert_map": local}
        experts.apply(
            output=out, hidden_states=x, w1=gate_up[chosen], w2=down[chosen], **given, rest=None
        )
        parts += out
    torch.testing.assert_close(parts, whole)
