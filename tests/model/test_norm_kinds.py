"""Sites made of each of vLLM's norms: those of weight w, those of weight 1 + w, and no others.

The sublayers' outputs are drawn, so that every site is compared with the definition by itself.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.models.nemotron import NemotronLayerNorm1P

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.kernels import backends, reference
from attnres_serve.model.site_norm import SiteNorm
from attnres_serve.model.stage import install_sites
from attnres_serve.settings import ALGORITHMS
from tests.model.test_site_norm import modules

pytestmark = pytest.mark.usefixtures("interpreter")
HERE = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.exhaustive)]
LAYERS, TOKENS, EPS, KEY_EPS = 3, 5, 1e-5, 1e-3
# A site's result is rounded once; half a unit in the last place, and float32 sums before it, which
# alone are some tens of roundings of 2^-24.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.01}


@pytest.fixture(autouse=True)
def configuration():
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield


def decoder(make: Any) -> Any:
    """A decoder of norms alone, each made by ``make``."""
    layers = [
        modules(input_layernorm=make(), post_attention_layernorm=make()) for _ in range(LAYERS)
    ]
    made = modules(layers=nn.ModuleList(layers), norm=make())
    made.start_layer, made.end_layer = 0, LAYERS
    return made


def spec(**options: Any) -> AttnResSpec:
    return AttnResSpec(Layout.of(LAYERS), (0, 1, 4), KEY_EPS, **options)


def install(own: AttnResSpec, dtype: torch.dtype, hidden: int, algorithm: str, backend: str) -> Any:
    """A decoder with norms of weight 1 + w, its sites and all their parameters drawn."""

    def make() -> GemmaRMSNorm:
        norm = GemmaRMSNorm(hidden, eps=EPS).to(dtype)
        norm.weight.data.copy_(0.3 * torch.randn(hidden))
        return norm

    made = decoder(make)
    before = dict(made.named_parameters())
    installed = install_sites(made, own, algorithm, backends.load(backend), TOKENS)
    after = dict(made.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    for site in installed.values():
        if site.site.mixes:
            site.query.data.copy_(torch.randn(hidden) / hidden**0.5)
            site.key_norm.data.copy_(1 + 0.3 * torch.randn(hidden))
    return made, list(installed.values())


def serve(norms: list[SiteNorm], deltas: list[Tensor]) -> list[Tensor]:
    """What every site gives for the outputs of the sublayers before it."""
    normed, residual = norms[0](deltas[0].clone()), deltas[0]
    found = [normed]
    for norm, delta in zip(norms[1:], deltas[1:], strict=True):
        normed, residual = norm(delta.clone(), residual)
        found.append(normed.clone())
    return found


def defined(norms: list[SiteNorm], deltas: list[Tensor], own: AttnResSpec) -> list[Tensor]:
    """The definition in float64, on partial sums that are rounded as they are served."""
    found, blocks, partial = [], [deltas[0]], None
    for norm, site, delta in zip(norms, sites(own), deltas, strict=True):
        weight = 1 + norm.weight.double()
        if site.index == 0:
            found.append(reference.rms_norm(delta.double(), weight, EPS))
            continue
        partial = reference.add_partial(partial, delta)
        sources = [*blocks, partial]
        if site.opens_block:
            blocks, partial = sources, None
        mixed = sources[-1].double()
        if site.mixes:
            query = norm.query.double() * norm.key_norm.double()
            mixed, _ = reference.mix(sources, query, KEY_EPS, torch.float64)
        found.append(reference.rms_norm(mixed, weight, EPS))
    return found


def check(
    norms: list[SiteNorm], own: AttnResSpec, dtype: torch.dtype, hidden: int, algorithm: str
) -> None:
    bound = BOUNDS[dtype]
    # Two-phase rounds the answers of phase 1 in between, of rows that are normed to some units.
    least = 8 * bound if algorithm == "two_phase" else 1e-5
    deltas = [torch.randn(TOKENS, hidden).to(dtype) for _ in norms]
    wanted, found = defined(norms, deltas, own), serve(norms, deltas)
    for one, right in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), right, atol=least, rtol=bound)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("hidden", [37, 96])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("backend", HERE)
def test_a_weight_w_stands_for_1_plus_w(
    backend: str, algorithm: str, hidden: int, dtype: torch.dtype
) -> None:
    """1 + w is not rounded to the dtype of w, and a weight that is written in place is seen."""
    own = spec(final_mix=hidden == 37)
    _, norms = install(own, dtype, hidden, algorithm, backend)
    check(norms, own, dtype, hidden, algorithm)
    for norm in norms:
        norm.weight.data.copy_(0.3 * torch.randn(hidden))
    check(norms, own, dtype, hidden, algorithm)


def grouped_norm() -> nn.Module:
    """An RMSNorm over groups; older versions of vLLM have none."""
    models = pytest.importorskip("vllm.model_executor.models.k2_horizon")
    return models.K2HorizonRMSNorm(16, 2)


@pytest.mark.parametrize("where", ["layers.1.post_attention_layernorm", "norm"])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: NemotronLayerNorm1P(16),
        lambda: LayerNorm(16),
        lambda: nn.LayerNorm(16),
        grouped_norm,
        lambda: RMSNorm(16, var_hidden_size=8),
        lambda: RMSNorm(16, has_weight=False),
    ],
)
def test_another_norm_is_refused_by_name(norm: Any, where: str) -> None:
    made = decoder(lambda: RMSNorm(16))
    other = norm()
    made.set_submodule(where, other)
    name = "the final norm" if where == "norm" else "the MLP of layer 1"
    with pytest.raises(CheckpointError) as raised:
        install_sites(made, spec(), "single_pass", backends.load("torch"), TOKENS)
    assert str(raised.value) == (
        f"the norm before {name} is vLLM's {type(other).__name__}; AttnRes is served with RMSNorm "
        "and GemmaRMSNorm over whole rows only."
    )
