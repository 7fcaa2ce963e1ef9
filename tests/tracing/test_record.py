"""Traces against the float64 model, and what must make them fail.

No engine: a worker's model is loaded and replayed in this process.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from edited_oracle import possible
from jobs import fresh_prompts
from lens_oracle import lens
from serving import GOLDENS

pytest.importorskip("vllm")

from in_process import world
from trace_cases import (
    BLOCK,
    FAR,
    NAMES,
    RANDOM,
    check_lens,
    check_replay,
    record,
    replayed,
    worker_of,
)
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sequence import IntermediateTensors

from attnres_serve.compat import logits
from attnres_serve.compat import replay as replays
from attnres_serve.kernels import reference
from attnres_serve.kernels.interface import MASKED, SiteWeights
from attnres_serve.model.site_norm import SiteOrderError
from attnres_serve.settings import ALGORITHMS
from attnres_serve.tracing import record as recording
from attnres_serve.verify import oracle
from attnres_serve.worker import WorkerExtension

HERE = ("cpp", "torch")
LENGTH = 37


@pytest.fixture(scope="module", autouse=True)
def one_world():
    random.seed()
    with world(BLOCK):
        yield


@pytest.mark.parametrize(
    ("golden", "algorithm", "backend", "chunk"),
    [
        pytest.param(
            *(golden, algorithm, backend, chunk),
            marks=[pytest.mark.exhaustive] * ((number + turn + at) % 2 + (chunk != usual) > 0),
        )
        for number, golden in enumerate(NAMES)
        for turn, algorithm in enumerate(ALGORITHMS)
        for at, (backend, usual) in enumerate(zip(HERE, (64, 16), strict=True))
        for chunk in (64, 16)
    ],
)
def test_every_format_algorithm_and_backend(golden, algorithm, backend, chunk):
    """With edits of every kind and without: all sites, tokens and vectors of a lens.

    In one pass and in chunks that no block of keys falls together with.
    """
    model = oracle.load(GOLDENS / golden)
    (ids,) = fresh_prompts((LENGTH,))
    worker = worker_of(GOLDENS / golden, algorithm, backend, chunk)
    assert replays.trace_problem(worker) is None
    for edits in ([], possible(model, LENGTH)):
        found = check_replay(worker, model, ids, edits)
        check_lens(found.lens, lens(model, ids, edits), ids)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreter")
# A model runs dry before it is loaded: NumPy, by which Triton is interpreted, warns of its NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_triton_backend(algorithm):
    """One golden of the test above, in Triton's interpreter."""
    test_every_format_algorithm_and_backend(BLOCK.name, algorithm, "triton", 64)


@pytest.mark.parametrize("name", RANDOM)
def test_random_checkpoints(tmp_path, name):
    """Windows, grouped heads, every part of a specification; also some sites and tokens only.

    A block of the cache has 128 tokens.
    """
    write, options = RANDOM[name]
    write(tmp_path / name, seed=random.randrange(10**6), **options)
    model = oracle.load(tmp_path / name)
    (ids,) = fresh_prompts((150,))
    worker = worker_of(tmp_path / name, random.choice(ALGORITHMS), random.choice(HERE), 16)
    whole = check_replay(worker, model, ids, []).traces
    chosen = sorted(random.sample(sorted(whole), 3))
    rows = sorted(random.sample(range(len(ids)), 7))
    found = record(worker, ids, rows, chosen)
    assert sorted(found) == chosen
    for index, part in found.items():
        for own, other in zip(part, whole[index], strict=True):
            torch.testing.assert_close(own, other[rows])
    check_replay(worker, model, ids[:LENGTH], possible(model, LENGTH))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_weights_explain_the_output_of_a_site(algorithm, dtype, monkeypatch):
    """In bfloat16 too: the trace's own check passes, and rows sum to 1."""
    monkeypatch.setattr(recording, "TOKENS_AT_ONCE", 90)
    worker = worker_of(BLOCK, algorithm, "cpp", 256, dtype=dtype)
    (ids,) = fresh_prompts((200,))
    for weights, _ in record(worker, ids, range(200), range(11)).values():
        assert len(weights) == 200
        assert (weights.sum(-1) - 1).abs().max() < 1e-5  # float32 here too


@pytest.mark.parametrize("change", [lambda x: x.flip(0), lambda x: x * torch.nan])
def test_a_site_that_gives_something_else_is_no_trace(change):
    """A site whose own numbers the weights do not explain is named, with its first wrong token."""
    worker = worker_of(BLOCK, "single_pass", "torch", 16)
    (ids,) = fresh_prompts((40,))
    site = worker.model_runner.get_model().attn_res_sites[5]

    def another(norm, arguments, output):
        normed, state = output
        return torch.cat((normed[:4], change(normed[4:]))), state

    site.register_forward_hook(another)
    with pytest.raises(recording.TraceError, match=r"site 5 .* at token 20, so there is no trace"):
        record(worker, ids, [3, 20, 39], [4, 5, 6])
    record(worker, ids, [3], [4, 5])
    record(worker, ids, [3, 20, 39], [4])


@pytest.mark.parametrize(
    "change",
    [
        {"bias": torch.tensor([0.0, 1.0, 0.0, 0.0])},
        {"bias": torch.tensor([0.0, 0.0, MASKED, 0.0])},
        {"logit_scale": 3.0},
        {"key_eps": 1.0},
        {"query": torch.ones(16)},
        {"norm_weight": -torch.ones(16)},
    ],
    ids=str,
)
def test_distance_tells_other_weights(change):
    """Right weights explain what the reference gives to its rounding; any wrong part does not."""
    generator = torch.Generator().manual_seed(7)
    sources = [torch.randn((5, 16), generator=generator) for _ in range(4)]
    drawn = [torch.randn(16, generator=generator) for _ in range(3)]
    site = SiteWeights(drawn[0], drawn[1], None, drawn[2], 1.0, 1e-5, 1e-6)
    normed, _ = reference.site(
        sources[3], None, sources[:3], drawn[0] * drawn[1], drawn[2], 1e-5, 1e-6
    )
    traced, distance = recording.attend(sources, site, normed)
    assert distance.max() < 1e-6  # some roundings of 2^-24
    _, weights = reference.mix(sources, drawn[0] * drawn[1], 1e-5)
    torch.testing.assert_close(traced.weights, weights)
    _, distance = recording.attend(sources, site._replace(**change), normed)
    assert distance.max() > recording.CLOSE[torch.float32]


def test_sources_of_zeros_are_traced():
    """A padding token's embedding can be all zeros: the weights are even, and nothing is wrong."""
    site = SiteWeights(torch.ones(8), torch.ones(8), None, torch.ones(8), 1.0, 1e-5, 1e-5)
    zeros = torch.zeros((1, 8))
    traced, distance = recording.attend([zeros, zeros], site, zeros)
    assert traced.weights.tolist() == [[0.5, 0.5]] and traced.rms.tolist() == [[0, 0]]
    assert distance.tolist() == [0]
    _, distance = recording.attend([zeros, zeros], site, zeros + torch.nan)
    assert not distance <= recording.CLOSE[torch.float32]


@pytest.mark.parametrize("edits", [[], [{"sources": ["embedding"], "mask": True}]], ids=len)
def test_nothing_is_left_behind(edits):
    """After a replay, also one that fails: no hook, vLLM's caches as they were, no pass counted."""
    worker = worker_of(BLOCK, "single_pass", HERE[0], 16)
    model = worker.model_runner.get_model()
    before = model.attn_res_executed()
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers]
    (ids,) = fresh_prompts((20,))
    replayed(worker, ids, edits)
    with pytest.raises(IndexError):
        replayed(worker, [*ids, 10**6], edits)
    assert model.attn_res_executed() == before
    assert not any(norm._forward_hooks for norm in model.attn_res_sites.values())
    assert caches and all(
        layer.kv_cache is cache and cache.isnan().all()
        for layer, cache in zip(layers, caches, strict=True)
    )


def test_a_worker_never_raises():
    """An error travels as a sentence: vLLM would mix up the answers of several workers."""
    worker = worker_of(BLOCK, "single_pass", HERE[0], 16)
    for ids in ([10**6], None):
        found = WorkerExtension.attn_res_trace(worker, ids, [0], [0])
        assert found.pop("problem").endswith("failed; the engine's log says why.")
        assert found == {"sites": [], "predicted": None, "lens": None, "vectors": {}}
    assert "its log says why" in WorkerExtension.attn_res_untraceable(SimpleNamespace())


@pytest.mark.parametrize("error", [recording.TraceError, SiteOrderError])
def test_a_trace_errors_sentence_is_passed_on(error, monkeypatch):
    """Any other is for the log: it may name files and addresses."""

    def fails(*_, **__):
        raise error("site 3 is late.")

    monkeypatch.setattr(recording, "record", fails)
    found = WorkerExtension.attn_res_trace(SimpleNamespace(), [1], [0], [0])
    assert found["problem"] == "site 3 is late."


class AttentionWithoutCache(AttentionLayerBase):
    def get_attn_backend(self): ...
    def get_kv_cache_spec(self, vllm_config): ...


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("parallel_config", {"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ("parallel_config", {"data_parallel_size": 2, "is_moe_model": True}, "--data-parallel"),
        ("", {"kv_transfer_config": object()}, "--kv-transfer-config"),
        ("", {"lora_config": object()}, "LoRA"),
        (
            "compilation_config",
            {"static_forward_context": {"another": AttentionWithoutCache()}},
            "no KV cache",
        ),
    ],
    ids=("context parallel", "data parallel", "connector", "adapters", "no cache"),
)
def test_models_without_replays_are_refused(part, values, said):
    worker = worker_of(BLOCK, "single_pass", "cpp", 16)
    whole = worker.vllm_config
    for key, value in values.items():
        object.__setattr__(getattr(whole, part) if part else whole, key, value)
    assert said in (replays.trace_problem(worker) or "")


class Stage:
    """A pipeline stage of ``compat.replay`` with a model that adds one; what it sends is queued."""

    def __init__(self, number: int, messages: list, fails_at: int | None = None) -> None:
        self.is_first_rank, self.is_last_rank = number == 0, number == 1
        self.messages, self.fails_at = messages, fails_at
        self.seen: list[list[int]] = []
        decoder = torch.nn.Linear(1, 1)
        decoder.forward = self.forward
        model = torch.nn.Sequential()
        model.model = decoder
        model.attn_res_chunk = 4
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(get_model=lambda: model, attn_groups=[]),
            vllm_config=VllmConfig(),
        )

    def forward(self, ids, positions, before):
        self.seen.append(positions.tolist())
        if len(self.seen) - 1 == self.fails_at:
            raise ValueError("the test says no")
        if self.is_last_rank:
            return before["hidden_states"] + 1
        return IntermediateTensors({"hidden_states": ids + 1})

    def send_tensor_dict(self, tensors: dict) -> None:
        self.messages.append(tensors)

    def recv_tensor_dict(self) -> dict:
        return self.messages.pop(0)

    def replay(self, monkeypatch) -> int:
        monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: self)
        return replays.replay(self.worker, list(range(10)))


CHUNKS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_stages_hand_on_chunk_by_chunk(monkeypatch):
    messages: list = []
    first, last = Stage(0, messages), Stage(1, messages)
    assert first.replay(monkeypatch) == 3 == len(messages)
    assert last.replay(monkeypatch) == 3
    assert first.seen == last.seen == CHUNKS and not messages


def test_a_stage_that_fails_leaves_no_message(monkeypatch):
    """The next stage learns of it; one that fails itself receives what is still sent."""
    messages: list = []
    first, last = Stage(0, messages, fails_at=1), Stage(1, messages)
    with pytest.raises(ValueError, match="the test says no"):
        first.replay(monkeypatch)
    assert len(messages) == 3 and messages[1:] == [{}, {}]
    with pytest.raises(RuntimeError, match="another pipeline stage failed"):
        last.replay(monkeypatch)
    assert last.seen == CHUNKS[:1] and not messages
    first, last = Stage(0, messages), Stage(1, messages, fails_at=0)
    first.replay(monkeypatch)
    with pytest.raises(ValueError, match="the test says no"):
        last.replay(monkeypatch)
    assert last.seen == CHUNKS[:1] and not messages


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True), (False, False)])
def test_stages_bring_rows_to_the_last(own, monkeypatch):
    """Those of the first stage come first; a stage may have none."""
    messages: list = []
    rows = [torch.full((2, 1), number) if has else None for number, has in enumerate(own)]
    for number in (0, 1):
        stage = Stage(number, messages)
        monkeypatch.setattr("vllm.distributed.get_pp_group", lambda stage=stage: stage)
        found = logits.collected(rows[number])
        assert number or (found is None and len(messages) == 1)
    assert not messages
    wanted = [number for number, has in enumerate(own) if has for _ in range(2)]
    assert (found is None) == (wanted == []) and (found is None or found[:, 0].tolist() == wanted)


assert FAR < 1e-3  # what the interface promises
