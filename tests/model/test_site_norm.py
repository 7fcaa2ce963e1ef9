"""The engine's own sites on a decoder of random matrices, against the float64 definition.

No engine: the sites are installed as in the engine, and run eagerly in this process.  Any
specification is drawn: starts, cumulative or begun anew, recency bias or one for each source,
shared queries, logit scale, final mix or none, over one pipeline stage or two.
"""

from collections.abc import Mapping
from itertools import pairwise
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnres_serve.verify.oracle import HOUSE_NAMES, Model, Spec, alike, rms_norm, site_role

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from attnres_serve.checkpoints.names import expected_parts
from attnres_serve.compat import host
from attnres_serve.depth import groups as site_groups
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import MASKED
from attnres_serve.model import streams
from attnres_serve.model.loading import parameters_of
from attnres_serve.model.sharded_site import Division
from attnres_serve.model.stage import install_sites, rows_received
from attnres_serve.settings import ALGORITHMS, STREAMS

HIDDEN, TOKENS, EPS, KEY_EPS = 24, 5, 1e-5, 1e-3
# Of a step; with the others, no two sites share a phase 1, or two or three do.
MOST_TOKENS = st.sampled_from([TOKENS, 1 << 40, site_groups.SCRATCH_BYTES // (2 * 4 * HIDDEN)])
pytestmark = pytest.mark.usefixtures("interpreter")
HERE = ("cpp", "torch", "triton")


@st.composite
def specs(draw: st.DrawFn) -> AttnResSpec:
    layers = draw(st.integers(1, 6))
    rest = draw(st.sets(st.integers(1, 2 * layers - 1)))
    return AttnResSpec(
        Layout.of(layers),
        (0, *sorted(rest)),
        KEY_EPS,
        final_mix=draw(st.booleans()),
        cumulative=draw(st.booleans()),
        logit_scale=draw(st.sampled_from([1.0, 0.25, 3])),
        **draw(
            st.just({"source_bias": True})
            | st.fixed_dictionaries(
                {
                    "recency_bias": st.booleans(),
                    "shared_queries": st.sampled_from([None, "layer", "block"]),
                }
            )
        ),
    )


class Definition(Model):
    """The oracle with a matrix and a tanh for every sublayer, and no head."""

    def sublayer(self, s: int, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(s, h) @ self.weights[f"matrix {s}"])

    def embed(self, ids: Tensor) -> Tensor:
        return ids

    def read_by_the_head(self, x: Tensor) -> Tensor:
        y: list[Tensor] = []
        for site in range(self.spec.final):
            y.append(self.sublayer(site, self.mix(site, x, y)[0]))
        return rms_norm(self.mix(self.spec.final, x, y)[0], self.weight("final_norm"), EPS)


def definition(spec: AttnResSpec, seed: int) -> Definition:
    """Random weights, by the oracle's names; the queries give spiky depth weights."""
    options = ("block_starts", "final_mix", "cumulative", "recency_bias", "source_bias")
    options += ("logit_scale",)
    own = Spec(
        names=HOUSE_NAMES,
        layout=alike(spec.layout.num_layers, ("attention", "mlp")),
        sublayers={},
        hidden=HIDDEN,
        vocab=0,
        eps=EPS,
        tied=False,
        key_norm_eps=KEY_EPS,
        shared_queries=spec.shared_queries,
        **{name: getattr(spec, name) for name in options},
    )
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:  # float32 values, so that both sides start from the same
        return torch.randn(shape, generator=generator).double()

    weights = {"model.norm.weight": 1 + 0.3 * draw(HIDDEN)}
    for s, (layer, kind) in enumerate(own.layout):
        weights[HOUSE_NAMES[f"{kind}_norm"].format(layer)] = 1 + 0.3 * draw(HIDDEN)
        weights[f"matrix {s}"] = draw(HIDDEN, HIDDEN) / HIDDEN**0.5
    for site in range(own.final + own.final_mix):
        role, layer = site_role(own, site)
        weights[HOUSE_NAMES[f"{role}_query"].format(layer)] = draw(1, HIDDEN) / HIDDEN**0.5
        weights[HOUSE_NAMES[f"{role}_key"].format(layer)] = 1 + 0.3 * draw(HIDDEN)
        weights[HOUSE_NAMES[f"{role}_recency"].format(layer)] = bias(own, site, generator)
    return Definition(own, weights)


def bias(own: Spec, site: int, generator: torch.Generator) -> Tensor:
    """A number, or one for each source: none, some or all but one of these are not read."""
    if not own.source_bias:
        return 2 * torch.randn(1, generator=generator).double()
    count = 1 + sum(start < site + own.cumulative for start in own.starts)
    drawn = 2 * torch.randn(count, generator=generator).double()
    chance, kept = (torch.rand(1, generator=generator).item() for _ in range(2))
    masked = torch.rand(count, generator=generator) < max(0, 2 * chance - 0.5)
    masked[int(kept * count)] = False
    return drawn.where(~masked, MASKED)


def modules(**children: nn.Module) -> Any:
    """A module with children; attributes of any type can be set on it."""
    parent = nn.Module()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def stage(
    own: Definition,
    spec: AttnResSpec,
    algorithm: str,
    backend: str,
    first: int,
    end: int,
    tokens: int = TOKENS,
    division: Division | None = None,
) -> tuple[Any, dict]:
    """Layers ``first`` to ``end`` with their sites, and the final norm in the last stage.

    Made for steps of ``tokens``: the more, the fewer sites share a phase 1.
    """

    def norm(weight: Tensor) -> RMSNorm:
        module = RMSNorm(HIDDEN, eps=EPS)
        module.weight.data.copy_(weight)
        return module

    decoder = modules(
        layers=nn.ModuleList(
            modules(
                input_layernorm=norm(own.weight("attention_norm", layer)),
                post_attention_layernorm=norm(own.weight("mlp_norm", layer)),
            )
            for layer in range(spec.layout.num_layers)
        ),
        norm=norm(own.weight("final_norm")) if end == spec.layout.num_layers else nn.Identity(),
    )
    decoder.start_layer, decoder.end_layer = first, end
    installed = install_sites(decoder, spec, algorithm, backends.load(backend), tokens, division)
    names = {"query": "query", "key_norm": "key", "bias": "recency"}
    for site in installed.values():
        role, layer = site_role(own.spec, site.site.tensors)
        for name, parameter in site.named_parameters():
            if name != "weight":
                stored = own.weight(f"{role}_{names[name]}", layer).view(-1)
                parameter.data.zero_()[-len(stored) :].copy_(stored)
    return decoder, installed


def serve(
    own: Definition,
    spec: AttnResSpec,
    algorithm: str,
    backend: str,
    split: int,
    x: Tensor,
    tokens: int = TOKENS,
    read: Mapping[str, list[Tensor]] | None = None,
    outputs: list[Tensor] | None = None,
) -> Tensor:
    """The residual convention of vLLM's decoders, over two pipeline stages if ``split``.

    ``read`` is filled with each stream before every layer and at the end, ``outputs`` with what
    the sublayers gave.
    """
    hidden, residual = x, None
    cuts = [0, *([split] if split else []), spec.layout.num_layers]
    for first, end in pairwise(cuts):
        decoder, installed = stage(own, spec, algorithm, backend, first, end, tokens)
        if first:
            rows = rows_received(spec, min(installed))
            assert residual.shape == (len(x), rows, HIDDEN)
        every = range(spec.layout.num_layers + 1)
        adders = {kind: streams.adder(installed, every, kind) for kind in read or {}}
        for index, layer in enumerate(decoder.layers[first:end], first):
            for stream, add in adders.items():
                add(read[stream], index, hidden, residual)
            for kind, norm in enumerate((layer.input_layernorm, layer.post_attention_layernorm)):
                if residual is None:
                    hidden, residual = norm(hidden), hidden
                else:
                    hidden, residual = norm(hidden, residual)
                hidden = torch.tanh(hidden @ own.weights[f"matrix {2 * index + kind}"].float())
                if outputs is not None:
                    outputs.append(hidden.clone())
                if installed[2 * index + kind].context.leaves_stage:
                    assert isinstance(residual, Tensor) and residual.dim() == 3
    for stream, add in adders.items():
        add(read[stream], spec.layout.num_layers, hidden, residual)
    return decoder.norm(hidden, residual)[0]


@pytest.fixture(scope="module", autouse=True)
def configuration():
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield


@settings(max_examples=60, deadline=None)
@given(
    specs(),
    st.integers(0, 2**31),
    st.sampled_from(ALGORITHMS),
    st.sampled_from(HERE),
    st.data(),
)
def test_any_specification_equals_its_definition(spec, seed, algorithm, backend, data) -> None:
    """The last norm reads what the definition says, to the rounding of float32."""
    split = data.draw(st.integers(0, spec.layout.num_layers - 1))
    own = definition(spec, seed)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(seed + 1))
    wanted = own.read_by_the_head(x.double())
    found = serve(own, spec, algorithm, backend, split, x, data.draw(MOST_TOKENS))
    # Some hundred roundings of 2^-24 through up to twelve sublayers with gains of one to three.
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(0, 2**31), st.sampled_from(ALGORITHMS), st.sampled_from(HERE))
def test_streams_of_any_specification(spec, seed, algorithm, backend) -> None:
    """The running sum, and the mix that follows, of the outputs that this run had."""
    own = definition(spec, seed)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(seed + 1))
    read: dict[str, list[Tensor]] = {stream: [] for stream in STREAMS}
    outputs: list[Tensor] = []
    serve(own, spec, algorithm, backend, 0, x, read=read, outputs=outputs)
    y = [output.double() for output in outputs]
    for layer, (partial, mixed) in enumerate(zip(*read.values(), strict=True)):
        site = 2 * layer
        last = own.sources(site, x.double(), y)[-1]
        # Sums and a mix of given sources in float32: some tens of roundings of 2^-24.
        torch.testing.assert_close(partial.double(), last, atol=1e-5, rtol=1e-5)
        mix = own.mix(site, x.double(), y)[0] if layer else x.double()
        torch.testing.assert_close(mixed.double(), mix, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_full_attnres_of_a_deep_model(algorithm: str, backend: str) -> None:
    """64 sublayers, each a block: up to 65 sources, and merges that read many rows since.

    16 in Triton's interpreter, whose time is that of all sites with all their sources.
    """
    layers = 8 if backend == "triton" else 32
    spec = AttnResSpec(Layout.of(layers), tuple(range(2 * layers)), KEY_EPS)
    own = definition(spec, seed=5)
    x = torch.randn((2, HIDDEN), generator=torch.Generator().manual_seed(6))
    found = serve(own, spec, algorithm, backend, 7, x)
    wanted = own.read_by_the_head(x.double())
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


# Of eight sites: three read the first two blocks, two the third as well, three the fourth as well.
CALLS = {
    "single_pass": ["single_pass"] * 8,
    "two_phase": [
        *("phase_1", "phase_2", "phase_2"),
        *("phase_1", "phase_2"),
        *("phase_1", "phase_2", "phase_2"),
    ],
}
# The torch backend norms the answer of the first site by itself.
IN_TORCH = {"phase_1": ["phase_1", "norm_answer"]}


class Spied:
    """A backend whose calls are noted."""

    def __init__(self, backend: ModuleType, calls: list[str]) -> None:
        self.backend, self.calls = backend, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.backend, name)
        if not isinstance(found, FunctionType):
            return found

        def noted(*arguments: Any) -> Any:
            self.calls.append(name)
            return found(*arguments)

        return noted


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_which_functions_run_for_each_choice(
    algorithm: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers cannot tell: every algorithm has the same."""
    calls: list[str] = []
    module = backends.load(backend)
    monkeypatch.setattr(backends, "load", lambda name, dtype=None: Spied(module, calls))
    spec = AttnResSpec(Layout.of(4), (0, 1, 4, 6), KEY_EPS)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(6))
    serve(definition(spec, seed=5), spec, algorithm, backend, 0, x)
    wanted = ["queries_of", *CALLS[algorithm]]
    if backend == "torch":
        wanted = [call for name in wanted[1:] for call in IN_TORCH.get(name, [name])]
    assert calls == wanted


def test_two_phase_without_groups_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block: the embedding is all that is ever finished."""
    said: list[str] = []
    monkeypatch.setattr(host, "logger", lambda: SimpleNamespace(warning=said.append))
    for starts, warnings in (((0, 2), 0), ((0,), 1)):
        spec = AttnResSpec(Layout.of(2), starts, KEY_EPS)
        stage(definition(spec, 0), spec, "two_phase", HERE[0], 0, 2)
        assert len(said) == warnings
    assert "with two_phase every site is a single pass" in said[0]


@example(AttnResSpec(Layout.of(2), (0, 3), KEY_EPS, recency_bias=True, shared_queries="layer"), 1)
@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(0, 5))
def test_every_tensor_fills_the_parameters_that_use_it(spec: AttnResSpec, split: int) -> None:
    """Over all stages, each parameter of each site is filled by exactly one expected tensor."""
    split = min(split, spec.layout.num_layers - 1)
    own = definition(spec, 0)
    filled: list[str] = []
    layers = spec.layout.num_layers
    for first, end in ((0, split), (split, layers)) if split else ((0, layers),):
        _, installed = stage(own, spec, "single_pass", "cpp", first, end)
        table = parameters_of(installed, spec, "model")
        assert list(table) == expected_parts(spec)
        filled += [name for names in table.values() for name in names]
    count = (2 * layers + spec.final_mix) * (2 + spec.has_biases)
    assert len(filled) == len(set(filled)) == count


def test_drawn_weights_leave_key_norms_neutral() -> None:
    """As those of vLLM's norms since 0.33, which a site takes over with what they know."""
    spec = AttnResSpec(Layout.of(2), (0, 2), KEY_EPS)
    _, installed = stage(definition(spec, 0), spec, "single_pass", "cpp", 0, 2)
    drawn = [norm.key_norm.dummy_weight_value for norm in installed.values() if norm.site.mixes]
    assert drawn == [1.0] * len(drawn) and len(drawn) == 5
