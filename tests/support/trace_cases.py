"""Traces in this process, by a worker without an engine, against the float64 model."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from checkpoints import EVERY_OPTION, write_fla, write_house, write_kimi_names, write_titan
from edited_oracle import evaluate, mixing_sites
from in_process import load, vllm_config, with_caches
from serving import GOLDENS
from torch import Tensor
from vllm.config import set_current_vllm_config

from attnres_serve.depth.edits import Edit
from attnres_serve.depth.resolved_edits import resolve
from attnres_serve.depth.sites import sites
from attnres_serve.model.config import spec_of
from attnres_serve.tracing import readings
from attnres_serve.tracing import record as recording
from attnres_serve.tracing.lens import Reader
from attnres_serve.tracing.predict import Predictions
from attnres_serve.tracing.predicted import NONE
from attnres_serve.verify import oracle

NAMES = sorted(path.name for path in GOLDENS.iterdir())
BLOCK = GOLDENS / "fla_transformer_block"
# What writes a checkpoint, and its options: every part of a specification.
RANDOM = {
    "window": (write_fla, {"block_size": 4, "window_size": 9}),
    "grouped": (write_fla, {"block_size": 4, "kv_heads": 1}),
    "llama": (write_house, {"base": "llama", "layers": 4, "block_size": 3}),
    **{
        name: (write_house, options)
        for name, options in {
            "qwen2_no_final_mix": {"base": "qwen2", "layers": 4, "block_size": 4}
            | {"final_mix": False},
            "variants": {"base": "qwen3", "layers": 4, "block_starts": [0, 1, 5]}
            | {"attn_res": EVERY_OPTION},
            "bias_on_blocks": {"base": "llama", "layers": 3, "block_size": 3}
            | {"attn_res": {"recency_bias": True}},
        }.items()
    },
    "qwen3_ar": (write_kimi_names, {"layers": 3, "block_layers": 2}),
    "torchtitan": (write_titan, {"layers": 3, "num_blocks": 2}),
}
# Two evaluations, float32 and float64, through up to twelve sublayers with gains of one to three.
# A sum of 64 products loses three roundings of 2^-24, and a sublayer has some such sums: a few
# hundred roundings of numbers of size one are 2e-5, and five times that is allowed.
FAR = 1e-4
LOGPROBS = 5e-4  # the same through the head, whose logits are some times as large
BLOCKS = 8  # of a cache, a sequence of 256 tokens and some more


def worker_of(folder: Path, algorithm: str, backend: str, chunk: int, **options) -> SimpleNamespace:
    """What a replay needs of vLLM's worker."""
    config = vllm_config(
        folder,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
        max_model_len=256,
        additional_config={"attnres_algorithm": algorithm, "attnres_backend": backend},
        **options,
    )
    model = load(config)
    with set_current_vllm_config(config):
        groups = with_caches(config, BLOCKS)
    runner = SimpleNamespace(get_model=lambda: model, attn_groups=groups)
    return SimpleNamespace(model_runner=runner, vllm_config=config)


def record(worker: SimpleNamespace, *asked) -> dict[int, recording.SiteTrace]:
    with set_current_vllm_config(worker.vllm_config):
        return recording.record(worker, *asked)


def wanted(model: oracle.Model, ids: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Of every site that mixes weights and RMS of the sources, ``[tokens, sources]`` float64."""
    weights, rms, _ = evaluate(model, ids, [])
    return weights, rms


class Replayed(NamedTuple):
    """All that a replay gives, of all sites and tokens.

    Attributes:
        traces: by site.
        predicted: the most probable tokens and their logprobs, ``[tokens, top]`` each, and the
            logprobs ``[tokens]`` of the tokens that follow.
        lens: predictions by site and vector, as an answer has them.
    """

    traces: dict[int, recording.SiteTrace]
    predicted: tuple[Tensor, Tensor, Tensor]
    lens: dict[tuple[int | None, str], list[dict]]


def replayed(
    worker: SimpleNamespace, ids: Sequence[int], asked: Sequence[dict] = (), top: int = 5
) -> Replayed:
    """All that a replay under edits gives."""
    every = sites(spec_of(worker.vllm_config.model_config.hf_config))
    hidden = worker.vllm_config.model_config.get_hidden_size()
    edits = resolve([Edit.model_validate(edit) for edit in asked], every, len(ids), hidden)
    mixing, rows, following = [site for site in every if site.mixes], range(len(ids)), [*ids[1:]]
    following.append(NONE)
    predictions = Predictions(rows, following, top)
    lens = readings.Lens(readings.readings(mixing), following, top)
    reader = Reader(lens)
    indices = [site.index for site in every]
    found = record(worker, ids, rows, indices, edits, predictions, reader)
    packed = reader.predictions.packed()
    read = readings.lens_readings(mixing, rows, lens, packed, lambda ids: [None] * len(ids))
    by_vector = {(one["site"], one["vector"]): one["predictions"] for one in read}
    return Replayed(found, unpacked(predictions.packed(), len(ids)), by_vector)


def check_replay(
    worker: SimpleNamespace, model: oracle.Model, ids: Sequence[int], edits: Sequence[dict]
) -> Replayed:
    """A replay under edits gives the float64 model's weights, magnitudes and logprobs."""
    weights, rms, logprobs = evaluate(model, ids, edits)
    found = replayed(worker, ids, edits)
    assert sorted(found.traces) == mixing_sites(model)
    for index, (own, size) in found.traces.items():
        torch.testing.assert_close(own.double(), weights[index], atol=FAR, rtol=0)
        torch.testing.assert_close(size.double(), rms[index], atol=FAR, rtol=FAR)
        assert (own.sum(-1) - 1).abs().max() < 1e-5  # a hundred roundings of 2^-24
    top, values, following = found.predicted
    wanted = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for own, other in (
        (values, logprobs.gather(1, top)),
        (values, logprobs.topk(top.shape[1]).values),
        (following[:-1], wanted),
    ):
        torch.testing.assert_close(own.double(), other, atol=LOGPROBS, rtol=0)
    return found


def check_vectors(
    model: oracle.Model, ids: Sequence[int], rows: Sequence[int], found: dict[str, Tensor]
) -> None:
    """The vectors of all sites and sublayers at these tokens are the float64 model's."""
    x, y, names = model.embed(ids), [], set()
    for site in range(model.spec.final + 1):
        mix, weights = model.mix(site, x, y)
        wanted = {}
        if weights is not None:
            wanted = {"sources": model.sources(site, x, y).transpose(0, 1), "mix": mix}
        if site < model.spec.final:
            y.append(model.sublayer(site, mix))
            wanted["output"] = y[-1]
        for part, own in wanted.items():
            name = f"site.{site}.{part}"
            names.add(name)
            torch.testing.assert_close(found[name].double(), own[rows], atol=FAR, rtol=FAR)
    assert found.keys() == names


def unpacked(packed: Sequence[bytes], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What ``Predictions.packed`` holds."""
    kinds = torch.int64, torch.float32, torch.float32
    parts = [
        torch.frombuffer(bytearray(part), dtype=kind)
        for part, kind in zip(packed, kinds, strict=True)
    ]
    return parts[0].view(rows, -1), parts[1].view(rows, -1), parts[2]


def check_lens(
    found: dict[tuple[int | None, str], list[dict]],
    wanted: dict[tuple[int | None, str], Tensor],
    ids: Sequence[int],
) -> None:
    """Every vector predicts what the float64 model says, by ``lens_oracle``."""
    assert found.keys() == wanted.keys()
    for key, rows in found.items():
        for row, own in zip(rows, wanted[key][[row["position"] for row in rows]], strict=True):
            named = [token["logprob"] for token in row["top"]]
            best = own.topk(len(named)).values
            of_named = own[[token["id"] for token in row["top"]]]
            for logprobs in (best, of_named):
                torch.testing.assert_close(
                    torch.tensor(named).double(), logprobs, atol=LOGPROBS, rtol=0
                )
            at = row["position"] + 1
            assert (row["next"] is None) == (at == len(ids))
            if row["next"] is not None:  # the log-softmax of a large logit has its relative error
                far = LOGPROBS + 2e-5 * abs(own[ids[at]])
                assert abs(row["next"] - own[ids[at]]) < far
