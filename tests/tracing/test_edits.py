"""Edited replays against the float64 model with the same edits; no engine."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cost import of_a_start
from jobs import fresh_prompts

pytest.importorskip("vllm")

from in_process import world
from trace_cases import BLOCK, Replayed, record, replayed, unpacked, worker_of

from attnres_serve.depth.edits import Edit
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.resolved_edits import Resolved, resolve
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.kernels.interface import SiteWeights
from attnres_serve.model.config import spec_of
from attnres_serve.tracing import record as recording
from attnres_serve.tracing.intervene import Intervention
from attnres_serve.tracing.predict import Predictions
from attnres_serve.tracing.predicted import NONE

HERE = ("cpp", "torch")
LENGTH = 37


@pytest.fixture(scope="module", autouse=True)
def one_world():
    with world(BLOCK):
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_edit_of_nothing_is_no_edit(dtype):
    """To the bit, by the own kernels of every site that it names."""
    worker = worker_of(BLOCK, "two_phase", HERE[0], 16, dtype=dtype)
    (ids,) = fresh_prompts((LENGTH,))
    plain = replayed(worker, ids, [])
    for nothing in ({"scale": 1}, {"sites": [0], "weights": [1]}, {"sites": [0], "mean": True}):
        assert same(replayed(worker, ids, [nothing]), plain)
    some = {"sites": [3], "sources": ["embedding"], "tokens": [20], "mask": True}
    other = replayed(worker, ids, [some])
    assert not same(other, plain)
    for index, (weights, rms) in other.traces.items():  # nothing before the site or the token
        same_rows = LENGTH if index < 3 else 20
        assert weights[:same_rows].equal(plain.traces[index].weights[:same_rows])
        assert rms[:same_rows].equal(plain.traces[index].rms[:same_rows])
    assert other.predicted[1][:20].equal(plain.predicted[1][:20])
    assert same(replayed(worker, ids, []), plain)


def same(one: Replayed, other: Replayed) -> bool:
    """Whether two replays found the same bits."""
    traces = zip(sorted(one.traces.items()), sorted(other.traces.items()), strict=True)
    return all(a.equal(b) for (_, x), (_, y) in traces for a, b in zip(x, y, strict=True)) and all(
        a[:-1].equal(b[:-1]) for a, b in zip(one.predicted, other.predicted, strict=True)
    )


def test_a_site_is_checked_before_it_is_edited():
    """A site whose own numbers its weights do not explain is an error, whatever an edit does."""
    worker = worker_of(BLOCK, "single_pass", HERE[0], 16)
    site = worker.model_runner.get_model().attn_res_sites[5]
    site.register_forward_hook(lambda norm, given, output: (output[0].flip(0), output[1]))
    (ids,) = fresh_prompts((20,))
    with pytest.raises(recording.TraceError, match="site 5"):
        replayed(worker, ids, [{"sites": [5], "mean": True}])


def test_logits_that_are_no_numbers_are_no_prediction():
    predictions = Predictions([0, 1], [5, NONE], 2)
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    assert Predictions([0], [1], 1).packed() is None
    predictions(model, 0, torch.zeros(2, 9))
    _, values, own = unpacked(predictions.packed(), 2)
    torch.testing.assert_close(values, torch.full((2, 2), 1 / 9).log())
    torch.testing.assert_close(own, torch.full((2,), 1 / 9).log())
    predictions(model, 0, torch.full((2, 9), torch.nan))
    with pytest.raises(ValueError, match="not numbers"):
        predictions.packed()


def test_edits_of_one_token_follow_each_other():
    """A masked source stays masked, and weights are what later factors act on."""
    worker = worker_of(BLOCK, "single_pass", HERE[0], 64)
    (ids,) = fresh_prompts((5,))
    one = {"sites": [6]}
    weights = one | {"sources": ["partial", "embedding"], "weights": [0.8, 0.2]}

    def at_six(*edits: dict[str, Any]) -> torch.Tensor:
        found = replayed(worker, ids, [one | edit for edit in edits])
        return found.traces[6].weights.double()

    mask = {"sources": ["embedding"], "mask": True}
    for factor in (0, -2, 3):
        assert (at_six(mask, {"scale": factor})[:, 0] == 0).all()
    wanted = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64).expand(5, -1)
    torch.testing.assert_close(at_six(weights), wanted)
    torch.testing.assert_close(at_six(mask, weights), wanted)
    powers = wanted**2
    scaled = at_six(weights, {"scale": 2})
    torch.testing.assert_close(scaled, powers / powers.sum(-1, keepdim=True))
    assert at_six(weights, mask)[:, 2].eq(1).all()
    assert at_six({"sources": ["block 1"], "force": True})[:, 1].eq(1).all()


def by_site(worker, **edit: Any) -> dict[int, list[int]]:
    """The numbers of the sources that an edit changes, by site."""
    spec = spec_of(worker.vllm_config.model_config.hf_config)
    (found,) = resolve([Edit.model_validate(edit)], sites(spec), 9)
    return dict(found.sites)


def test_sites_that_are_not_named():
    """Those at which the edit is possible: blocks of four sublayers, ten of them."""
    worker = worker_of(BLOCK, "single_pass", HERE[0], 64)
    both = ["block 1", "embedding"]
    assert by_site(worker, mask=True, sources=["embedding"]) == {at: [0] for at in range(1, 11)}
    assert by_site(worker, mask=True, sources=["partial"]).keys() == {1, 2, 3, 5, 6, 7, 9, 10}
    # Site 4 reads both alone; before it there is no block 1.
    few = {at: [1, 0] for at in range(5, 11)}
    assert by_site(worker, mask=True, sources=both) == {1: [0], 2: [0], 3: [0]} | few
    assert by_site(worker, mean=True, sources=both) == {4: [1, 0]} | few
    assert by_site(worker, weights=[0.9, 0.1], sources=both) == {4: [1, 0]} | few
    assert by_site(worker, weights=[0.9, 0.1]) == {at: [0, 1] for at in (1, 2, 3, 4)}
    assert by_site(worker, force=True, sources=["block 2"]).keys() == {8, 9, 10}
    assert by_site(worker, scale=2).keys() == set(range(11))
    assert by_site(worker, scale=2, sources=both)[1] == [0]
    assert by_site(worker, mean=True, sites=["final", "mlp 1", 2]).keys() == {2, 3, 10}
    assert by_site(worker, mean=True, sites=["mlp"]).keys() == {1, 3, 5, 7, 9}


def edited_weights(*edits: Resolved, rows: int = 2) -> torch.Tensor:
    """What site 0 of three random sources reads under edits."""
    torch.manual_seed(0)
    sources = [torch.randn(rows, 8) for _ in range(3)]
    one = torch.ones(8)
    site = SiteWeights(torch.randn(8), one, None, one, 1.0, 1e-6, 1e-6)
    change = Intervention(edits)
    _, weights = change.weights(0, sources, site, range(rows))
    assert change.problem is None
    return weights


def everywhere(kind: str, values: list[float], columns: list[int]) -> Resolved:
    return Resolved(kind, [(0, 2)], values, [(0, columns)])


@pytest.mark.parametrize("times", [13, 64])
def test_factors_may_be_large(times):
    """The greatest logit wins, and the least under a negative factor; nothing is infinite."""
    own, large = edited_weights(), everywhere("scale", [1000.0], [0, 1, 2])
    last = everywhere("scale", [-1000.0], [0, 1, 2])
    found = edited_weights(*[large] * times)
    assert found.argmax(-1).equal(own.argmax(-1)) and found.max(-1).values.eq(1).all()
    found = edited_weights(*[large] * (times - 1), last)
    assert found.argmax(-1).equal(own.argmin(-1)) and found.max(-1).values.eq(1).all()


def test_a_weight_may_be_tiny():
    """One that float32 does not have is what is left when the others are masked."""
    given = everywhere("weights", [1.0, 1e-50], [0, 1])
    assert edited_weights(given).equal(torch.tensor([[1.0, 0, 0]] * 2))
    found = edited_weights(given, everywhere("mask", [], [0]))
    assert found.equal(torch.tensor([[0, 1.0, 0]] * 2))


def test_edited_weights_that_are_no_numbers_are_no_trace():
    """A mask of everything, which no request can ask for."""
    worker = worker_of(BLOCK, "single_pass", HERE[0], 16)
    count = sites(spec_of(worker.vllm_config.model_config.hf_config))[10].num_sources
    nothing = Resolved("mask", [(4, 5)], [], [(10, list(range(count)))])
    with pytest.raises(recording.TraceError, match="site 10 are not numbers"):
        record(worker, [3] * 9, [], [], [nothing])


def test_many_runs_take_the_time_of_few():
    """Every second token of a long sequence; a loop over the runs would take hundreds of times."""

    def edited(runs: list[tuple[int, int]]) -> tuple[torch.Tensor, float]:
        edit = Resolved("scale", runs, [2.0], [(0, [0, 1, 2])])
        begin = time.process_time()
        return edited_weights(*[edit] * 64, rows=4096), time.process_time() - begin

    few = [edited([(0, 4096)])[1] for _ in range(3)]
    turns = [edited([(at, at + 1) for at in range(0, 4096, 2)]) for _ in range(3)]
    # 2048 runs against one; on a busy machine one time is some times another.
    assert min(seconds for _, seconds in turns) < 10 * max(few)
    own, found = edited_weights(rows=4096), turns[0][0]
    assert found[1::2].equal(own[1::2]) and (found[::2] != own[::2]).any(-1).all()


def test_edits_are_validated_fast():
    """Of many sites, tokens and runs, and of names that repeat."""
    model = sites(AttnResSpec(Layout.of(32), tuple(range(0, 64, 8)), 1e-6))
    scattered = list(range(0, 4096, 2))
    edits = [Edit.model_validate({"mean": True, "tokens": scattered}) for _ in range(8)]
    repeated = Edit.model_validate({"sites": [0] * 400_000, "tokens": [0], "mean": True})
    names = [f"block {at}" for at in range(10**6)]
    unknown = Edit.model_validate({"sources": names, "tokens": [0], "mask": True})
    begin = time.process_time()
    resolve([*edits, repeated], model, 4096)
    with pytest.raises(SettingError, match="reads block 0"):
        resolve([unknown], model, 4096)
    assert time.process_time() - begin < of_a_start()
