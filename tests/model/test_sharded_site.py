"""Sites whose tokens are divided over workers, which are threads here, against undivided ones.

No engine: the decoder of ``test_site_norm``, of whose sublayers each worker has a part of the sum,
or, as of experts, the sum.  The parts are channels of it, so that no sum is rounded, and each
result is that of one worker to the bit where a token is computed alone.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

from attnres_serve.compat import token_shards
from attnres_serve.depth.layout import ONE, Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.model.bank_state import BankState
from attnres_serve.model.sharded_site import Division, leave_sums
from attnres_serve.settings import ALGORITHMS
from tests.model.test_site_norm import HIDDEN, KEY_EPS, Definition, definition, modules, stage

LAYERS, STARTS = 4, (0, 1, 4, 6)
EXPERTS = (3, 7)  # sublayers that add up themselves
LEAST = 2
CONFIG = VllmConfig()


class Worker:
    """vLLM's group of workers as one of them sees it, and what it was asked for."""

    def __init__(self, rank: int, given: list[Any], barrier: Barrier) -> None:
        self.rank_in_group, self.world_size = rank, len(given)
        self.given, self.barrier = given, barrier
        self.asked: Counter[str] = Counter()

    def _of_all(self, name: str, x: Tensor) -> list[Tensor]:
        self.asked[name] += 1
        self.given[self.rank_in_group] = x
        self.barrier.wait(60)
        found = [one.clone() for one in self.given]
        self.barrier.wait(60)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(sum(self._of_all("all_reduce", x)))  # as on a CPU

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        total = sum(self._of_all("reduce_scatter", x))
        return total.chunk(self.world_size)[self.rank_in_group].clone()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._of_all("all_gather", x))


def forward(
    own: Definition,
    spec: AttnResSpec,
    algorithm: str,
    backend: str,
    x: Tensor,
    division: Division | None = None,
    rank: int = 0,
    workers: int = 1,
) -> tuple[Tensor, Any]:
    """What a worker's last norm gives, and the last state."""
    decoder, installed = stage(own, spec, algorithm, backend, 0, LAYERS, len(x), division)
    if division is not None:
        for index in installed:
            installed[index].reduces_delta = index - 1 not in EXPERTS
    hidden, residual = x.clone(), None
    for index in range(2 * LAYERS):
        norm = installed[index]
        if residual is None:
            hidden, residual = norm(hidden), hidden
        else:
            hidden, residual = norm(hidden, residual)
        hidden = torch.tanh(hidden @ own.weights[f"matrix {index}"].float())
        if division is not None and index not in EXPERTS:
            hidden = hidden * (torch.arange(HIDDEN) % workers == rank)
    return decoder.norm(hidden, residual)


def run(workers: int, tokens: int, spec: AttnResSpec, algorithm: str, backend: str, patch: Any):
    """What one undivided worker gives, and what each of several gives, with its state and group."""
    own, mine = definition(spec, seed=tokens), local()
    x = torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(tokens))
    given, barrier = [None] * workers, Barrier(workers)
    patch.setattr(token_shards, "_group", lambda: mine.group)

    def work(rank: int) -> tuple[Tensor, Any, Worker]:
        mine.group = Worker(rank, given, barrier)
        with set_current_vllm_config(CONFIG), torch.inference_mode():
            division = Division(LEAST)
            found = forward(own, spec, algorithm, backend, x, division, rank, workers)
        return *found, mine.group

    with set_current_vllm_config(CONFIG), torch.inference_mode():
        whole, _ = forward(own, spec, algorithm, backend, x)
    with ThreadPoolExecutor(workers) as pool:
        return whole, list(pool.map(work, range(workers)))


@pytest.mark.parametrize("tokens", [1, 3, 8, 13])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_equal_a_single_one(algorithm, backend, workers, tokens, monkeypatch) -> None:
    """Also of fewer tokens than workers, and of numbers that they do not divide."""
    for options in ({}, {"cumulative": True, "recency_bias": True}, {"final_mix": False}):
        spec = AttnResSpec(Layout.of(LAYERS), STARTS, KEY_EPS, **options)
        whole, found = run(workers, tokens, spec, algorithm, backend, monkeypatch)
        for normed, _, _ in found:
            # torch adds up in an order that depends on the number of rows.
            far = {} if backend == "torch" else {"atol": 0, "rtol": 0}
            torch.testing.assert_close(normed, whole, **far)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (3, 2), (8, 4)])
def test_the_bytes_of_a_step(tokens, rows, monkeypatch) -> None:
    """Two collectives for one behind a sum, one for none behind experts; a bank of own tokens."""
    spec = AttnResSpec(Layout.of(LAYERS), STARTS, KEY_EPS)
    _, found = run(2, tokens, spec, "two_phase", "cpp", monkeypatch)
    sites, sums = 2 * LAYERS, 2 * LAYERS - len(EXPERTS)
    for _, state, group in found:
        assert isinstance(state, BankState)
        assert state.bank.shape == (rows, len(STARTS) + 1, HIDDEN)
        assert state.answers[0].shape[1:] == (rows, HIDDEN)
        divided = {"reduce_scatter": sums, "all_gather": sites}
        assert group.asked == (divided if tokens >= LEAST else {"all_reduce": sums})


class Operators(TorchDispatchMode):
    """Lists what torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_small_step_equals_whole_sites(algorithm, backend, tokens, monkeypatch) -> None:
    """Operator for operator, but for the sum, which the sublayers would begin themselves."""
    spec = AttnResSpec(Layout.of(LAYERS), STARTS, KEY_EPS)
    own, ran = definition(spec, seed=tokens), []
    monkeypatch.setattr(token_shards, "_group", lambda: SimpleNamespace(all_reduce=lambda x: x))
    for division in (None, Division(9)):
        _, installed = stage(own, spec, algorithm, backend, 0, LAYERS, tokens, division)
        deltas = torch.randn((2 * LAYERS + 1, tokens, HIDDEN))
        with set_current_vllm_config(CONFIG), torch.inference_mode(), Operators() as found:
            residual = deltas[0]
            for index, delta in enumerate(deltas[1:], 1):
                installed[index].reduces_delta = True
                _, residual = installed[index](delta, residual)
        ran.append(found.ran)
    assert ran[0] == ran[1]
    assert len(ran[0]) > 2 * LAYERS


@pytest.mark.parametrize(
    ("child", "kind", "is_left"),
    [
        ("self_attn", "attention", True),
        ("linear_attn", "attention", True),
        ("feed_forward", "mlp", True),
        ("mixer", ONE, True),
        ("block_sparse_moe", "mlp", False),  # has experts
        ("self_attn", "mlp", False),
    ],
)
def test_whose_sums_are_left(child, kind, is_left) -> None:
    """Those of the one row-parallel layer of a sublayer, if no kernel of its own adds up."""
    layer = modules(**{child: modules(o_proj=row_parallel(), norm=nn.Identity())})
    sublayer = layer.get_submodule(child)
    sublayer.gemm_rs_ar = object()
    assert not token_shards.leave_sum(layer, kind)
    sublayer.gemm_rs_ar = None
    assert token_shards.leave_sum(layer, kind) == is_left
    assert sublayer.o_proj.reduce_results != is_left
    assert not token_shards.leave_sum(layer, kind)  # nothing adds up any more, or nothing did
    experts = modules(**{child: modules(shared=modules(down_proj=row_parallel()))})
    two = modules(**{child: modules(o_proj=row_parallel(), g_proj=row_parallel())})
    assert not token_shards.leave_sum(experts, kind)
    assert not token_shards.leave_sum(two, kind)


@pytest.mark.parametrize("norms", [RMSNorm, GemmaRMSNorm])
def test_a_layer_that_norms_its_sublayers_needs_whole_sums(norms) -> None:
    """Norms within a sublayer do not matter."""
    spec = AttnResSpec(Layout.of(1), (0,), KEY_EPS)
    for behind in (False, True):
        with set_current_vllm_config(CONFIG):
            own, division = definition(spec, seed=1), Division(LEAST)
            _, sites = stage(own, spec, "two_phase", "cpp", 0, 1, 8, division)
            layer = modules(
                input_layernorm=sites[0],
                post_attention_layernorm=sites[1],
                self_attn=modules(o_proj=row_parallel(), q_norm=norms(HIDDEN)),
                mlp=modules(down_proj=row_parallel()),
                **({"post_mlp_layernorm": norms(HIDDEN)} if behind else {}),
            )
        leave_sums(SimpleNamespace(layers=[layer]), spec, sites)
        assert [sites[index].reduces_delta for index in (1, 2)] == [not behind] * 2
        assert layer.self_attn.o_proj.reduce_results == behind


def row_parallel() -> Any:
    """As much of vLLM's layer as is looked at."""
    layer = RowParallelLinear.__new__(RowParallelLinear)
    nn.Module.__init__(layer)
    layer.reduce_results = True
    return layer


@pytest.mark.parametrize(
    ("workers", "tokens", "rows"),
    [(2, 8192, 4096), (16, 8192, 1023), (8, 16000, 2000), (4, 64, 64)],
)
def test_the_tokens_of_a_bank(workers, tokens, rows) -> None:
    """Those of the largest undivided step, if these are more; all, where no step is divided."""
    config = SimpleNamespace(
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(tensor_parallel_size=workers),
    )
    assert token_shards.most(config) == tokens
    config.additional_config = {"attnres_shard_sites": "on"}
    assert token_shards.most(config) == rows
