"""The vectors of a replay against the float64 model, and sources that are replaced by them."""

import base64
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from jobs import fresh_prompts
from serving import GOLDENS

pytest.importorskip("vllm")

from in_process import world
from trace_cases import BLOCK, FAR, LOGPROBS, check_vectors, record, replayed, worker_of

from attnres_serve.depth.edits import Edit
from attnres_serve.depth.resolved_edits import Resolved, resolve
from attnres_serve.depth.sites import sites
from attnres_serve.model.config import spec_of
from attnres_serve.tracing.vectors import Vectors
from attnres_serve.verify import oracle

CUMULATIVE = GOLDENS / "qwen3_attnres_cumulative_block"
LENGTH, CHUNK, D = 37, 16, 64


@pytest.fixture(scope="module", autouse=True)
def one_world():
    with world(BLOCK):
        yield


def every_site(worker: SimpleNamespace):
    return sites(spec_of(worker.vllm_config.model_config.hf_config))


def taken(
    worker: SimpleNamespace, ids: Sequence[int], rows: Sequence[int], edits: Sequence[Resolved] = ()
) -> dict[str, torch.Tensor]:
    """The vectors of all sites."""
    vectors = Vectors(rows)
    indices = [site.index for site in every_site(worker) if site.mixes]
    record(worker, ids, rows, indices, edits, None, None, vectors)
    return {
        name: torch.frombuffer(bytearray(content), dtype=torch.float32).view(shape)
        for name, (shape, content) in vectors.packed().items()
    }


@pytest.mark.parametrize("algorithm", ["single_pass", "two_phase"])
@pytest.mark.parametrize("golden", [BLOCK, CUMULATIVE], ids=lambda path: path.name)
def test_vectors_equal_those_of_the_float64_model(golden, algorithm):
    """Of tokens in all three chunks; every sublayer's output, also where no final mix follows."""
    worker, model = worker_of(golden, algorithm, "cpp", CHUNK), oracle.load(golden)
    (ids,) = fresh_prompts((LENGTH,))
    rows = [0, 9, 15, 16, 36]
    check_vectors(model, ids, rows, taken(worker, ids, rows))


def replacing(vectors: torch.Tensor, **where) -> dict:
    content = vectors.float().contiguous().numpy().tobytes()
    return where | {"replace": base64.b64encode(content).decode()}


def all_sources(worker: SimpleNamespace, found: dict[str, torch.Tensor], first: int) -> list[dict]:
    """Edits that replace every source of every site from one on."""
    return [
        replacing(found[f"site.{site.index}.sources"][:, at], sites=[site.index], sources=[name])
        for site in every_site(worker)
        if site.index >= first
        for at, name in enumerate(site.sources)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ["single_pass", "two_phase"])
def test_replacing_vectors_by_themselves_changes_nothing(dtype, algorithm):
    """To the bit, by the own kernels of every site."""
    worker = worker_of(BLOCK, algorithm, "cpp", CHUNK, dtype=dtype)
    (ids,) = fresh_prompts((LENGTH,))
    plain = replayed(worker, ids, [])
    edited = replayed(worker, ids, all_sources(worker, taken(worker, ids, range(LENGTH)), 0))
    for own, other in zip(edited.predicted, plain.predicted, strict=True):
        assert own[:-1].equal(other[:-1])
    for index, trace in plain.traces.items():
        assert all(a.equal(b) for a, b in zip(trace, edited.traces[index], strict=True))


@pytest.mark.parametrize("first", [3, 8, 10])
def test_all_vectors_of_another_run_give_its_result(first):
    worker = worker_of(BLOCK, "two_phase", "cpp", CHUNK)
    ids, others = fresh_prompts((LENGTH, LENGTH))
    wanted, plain = replayed(worker, others, []), replayed(worker, ids, [])
    edits = all_sources(worker, taken(worker, others, range(LENGTH)), first)
    found = replayed(worker, ids, edits)
    close = {"atol": LOGPROBS, "rtol": 0}
    torch.testing.assert_close(found.predicted[1], wanted.predicted[1], **close)
    assert not torch.allclose(plain.predicted[1], wanted.predicted[1], **close)
    for index, (weights, rms) in wanted.traces.items():
        own = found.traces[index]
        if index >= first:
            torch.testing.assert_close(own.weights, weights, atol=FAR, rtol=0)
            torch.testing.assert_close(own.rms, rms, atol=FAR, rtol=FAR)
        else:
            assert own.weights.equal(plain.traces[index].weights)


def test_each_token_reads_its_vector():
    """One for each of the edit's tokens in several chunks, or one for all; the last edit wins."""
    worker = worker_of(BLOCK, "single_pass", "cpp", CHUNK)
    (ids,) = fresh_prompts((LENGTH,))
    tokens, each, one = [3, 15, 16, 30], torch.randn(4, D), torch.randn(D)
    asked = [
        replacing(each, sites=[5], sources=["block 1"], tokens=tokens),
        replacing(one, sites=[5], sources=["block 1"], tokens={"start": 30, "end": 33}),
    ]
    edits = resolve([Edit.model_validate(edit) for edit in asked], every_site(worker), LENGTH, D)
    plain, found = (taken(worker, ids, range(LENGTH), own) for own in ([], edits))
    wanted = plain["site.5.sources"].clone()
    wanted[tokens, 1] = each
    wanted[30:33, 1] = one
    assert found["site.5.sources"].equal(wanted)
    assert found["site.4.output"].equal(plain["site.4.output"])
    changed = (found["site.5.mix"] != plain["site.5.mix"]).any(-1).nonzero()[:, 0].tolist()
    assert changed == [3, 15, 16, 30, 31, 32]


def test_nothing_is_replaced_where_there_is_no_sequence():
    worker = worker_of(BLOCK, "single_pass", "cpp", CHUNK)
    edit = Edit.model_validate(replacing(torch.zeros(D), sources=["embedding"]))
    with pytest.raises(ValueError, match=r"edits\[0\].replace is for traces: its vectors are of"):
        resolve([edit], every_site(worker), 1)
