"""Traces in this process, by a worker without an engine, against the float64 model."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from checkpoints import EVERY_OPTION, write_fla, write_house, write_kimi_names, write_titan
from edited_oracle import evaluate
from in_process import load, vllm_config, with_caches
from serving import GOLDENS
from torch import Tensor
from vllm.config import set_current_vllm_config

from attnres_serve.depth.sites import sites
from attnres_serve.model.config import spec_of
from attnres_serve.tracing import readings
from attnres_serve.tracing import record as recording
from attnres_serve.tracing.answer import NONE
from attnres_serve.tracing.edits import Edit, resolve
from attnres_serve.tracing.lens import Reader
from attnres_serve.tracing.predict import Predictions
from attnres_serve.verify import oracle

NAMES = sorted(path.name for path in GOLDENS.iterdir())
BLOCK = GOLDENS / "fla_transformer_block"
# What writes a checkpoint, and its options: every part of a specification.
RANDOM = {
    "window": (write_fla, {"block_size": 4, "window_size": 9}),
    "grouped": (write_fla, {"block_size": 4, "kv_heads": 1}),
    "llama": (write_house, {"base": "llama", "layers": 4, "block_size": 3}),
    "qwen2_no_final_mix": (
        write_house,
        {"base": "qwen2", "layers": 4, "block_size": 4, "final_mix": False},
    ),
    "variants": (
        write_house,
        {
            "base": "qwen3",
            "layers": 4,
            "block_starts": [0, 1, 5],
            "attn_res": EVERY_OPTION,
        },
    ),
    "bias_on_blocks": (
        write_house,
        {"base": "llama", "layers": 3, "block_size": 3, "attn_res": {"recency_bias": True}},
    ),
    "qwen3_ar": (write_kimi_names, {"layers": 3, "block_layers": 2}),
    "torchtitan": (write_titan, {"layers": 3, "num_blocks": 2}),
}
# Two evaluations, float32 and float64, through up to twelve sublayers with gains of one to three;
# what was found is a twentieth of it.
FAR = 1e-4
LOGPROBS = 5e-4  # the same through the head
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


def check(
    found: dict[int, recording.SiteTrace], model: oracle.Model, ids: Sequence[int], rows: list[int]
) -> None:
    """Every traced site gives the float64 model's weights and magnitudes."""
    weights, rms = wanted(model, ids)
    for index, (own, size) in found.items():
        torch.testing.assert_close(own.double(), weights[index][rows], atol=FAR, rtol=0)
        torch.testing.assert_close(size.double(), rms[index][rows], atol=FAR, rtol=FAR)
        assert (own.sum(-1) - 1).abs().max() < 1e-5


def edited_record(
    worker: SimpleNamespace, ids: Sequence[int], asked: Sequence[dict], top: int = 5
) -> tuple[dict[int, recording.SiteTrace], tuple[Tensor, Tensor, Tensor]]:
    """All traces of an edited replay, and what it predicts: `top` tokens and their logprobs,
    ``[tokens, top]`` each, and the logprobs ``[tokens]`` of the tokens that follow."""
    spec = spec_of(worker.vllm_config.model_config.hf_config)
    edits = resolve([Edit.model_validate(edit) for edit in asked], sites(spec), len(ids))
    predictions = Predictions(range(len(ids)), [*ids[1:], NONE], top)
    every = range(spec.num_sublayers + 1)
    found = record(worker, ids, range(len(ids)), every, edits, predictions)
    return found, unpacked(predictions.packed(), len(ids))


def unpacked(packed: Sequence[bytes], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What ``Predictions.packed`` holds."""
    kinds = torch.int64, torch.float32, torch.float32
    parts = [
        torch.frombuffer(bytearray(part), dtype=kind)
        for part, kind in zip(packed, kinds, strict=True)
    ]
    return parts[0].view(rows, -1), parts[1].view(rows, -1), parts[2]


def lens_record(
    worker: SimpleNamespace, ids: Sequence[int], asked: Sequence[dict] = (), top: int = 5
) -> dict[tuple[int | None, str], list[dict]]:
    """What a lens of all sites and tokens answers: predictions by site and vector."""
    spec = spec_of(worker.vllm_config.model_config.hf_config)
    edits = resolve([Edit.model_validate(edit) for edit in asked], sites(spec), len(ids))
    mixing, rows = [site for site in sites(spec) if site.mixes], range(len(ids))
    lens = readings.Lens(readings.readings(mixing), [*ids[1:], NONE], top)
    reader = Reader(lens)
    every = [site.index for site in mixing]
    record(worker, ids, rows, every, edits, None, reader)
    packed = reader.predictions.packed()
    found = readings.answered(mixing, rows, lens, packed, lambda ids: [None] * len(ids))
    return {(one["site"], one["vector"]): one["predictions"] for one in found}


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
