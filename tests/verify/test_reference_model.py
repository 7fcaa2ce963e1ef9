"""``attnres_serve.reference_model``: its numbers, its gradients, and what it does not know."""

import json

import pytest
import torch
from checkpoints import GOLDENS, write_house
from checkpoints.hugging_face import write_tiny
from goldens import bound, expected
from safetensors.torch import load_file

import attnres_serve
from attnres_serve import cli
from attnres_serve.errors import CheckpointError, SettingError

GOLDEN = GOLDENS / "qwen3_attnres_cumulative_block"  # with recency biases
IDS = [(7 * i * i + 3 * i + 5) % 60 for i in range(12)]
STEP = 1e-5
# The third derivative times the step's square, and a rounding of 1e-16 of the loss over the step.
NEAR = 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("golden", ["fla_transformer_block", "nanogpt_block", GOLDEN.name])
def test_logprobs_are_a_goldens(golden, dtype):
    model = attnres_serve.reference_model(GOLDENS / golden, dtype)
    for case in expected(GOLDENS / golden):
        ids = case["prompt"]
        logprobs = model(torch.tensor(ids))
        assert logprobs.dtype == dtype and logprobs.shape[0] == len(ids)
        own = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        for found, wanted in zip(own.tolist(), case["prompt_logprobs"][1:], strict=True):
            assert abs(found - wanted) < bound(wanted)


def test_parameters_are_the_checkpoints_tensors():
    found = dict(attnres_serve.reference_model(GOLDEN, torch.float32).named_parameters())
    stored = load_file(GOLDEN / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(found[name].equal(tensor.float()) for name, tensor in stored.items())


@pytest.mark.parametrize("golden", ["fla_transformer_block", GOLDEN.name])
def test_gradients_agree_with_finite_differences(golden):
    """Of every parameter in one direction: queries, key norms and recency biases among them."""
    model = attnres_serve.reference_model(GOLDENS / golden)
    following = torch.tensor(IDS[1:])[:, None]

    def loss() -> torch.Tensor:
        return -model(IDS)[:-1].gather(1, following).mean()

    loss().backward()
    generator = torch.Generator().manual_seed(3)
    moved = 0
    for name, parameter in model.named_parameters():
        along = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        along /= along.norm()
        assert parameter.grad is not None or "layers.0.attn_res" in name, name
        slope = 0.0 if parameter.grad is None else (parameter.grad * along).sum().item()
        with torch.no_grad():
            ends = []
            for step in (STEP, -STEP):
                parameter.add_(along, alpha=step)
                ends.append(loss().item())
                parameter.sub_(along, alpha=step)
        measured = (ends[0] - ends[1]) / (2 * STEP)
        assert abs(slope - measured) < NEAR * (1 + abs(slope)), (name, slope, measured)
        moved += abs(slope) > 1e-4
    assert moved > 10


def test_unknown_families_are_refused(tmp_path):
    write_house(tmp_path / "a", base="llama", layers=2, block_size=2)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    model = attnres_serve.reference_model(tmp_path / "a")
    for ids in ([], [-1], [config["vocab_size"]], [[1]]):
        with pytest.raises(SettingError, match=r"expected a list of token ids from 0 to"):
            model(ids)
    with pytest.raises(SettingError, match=r"found torch.bfloat16; expected torch.float32 or"):
        attnres_serve.reference_model(tmp_path / "a", torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        attnres_serve.reference_model(tmp_path)
    plain = write_tiny(tmp_path / "b", "gemma2", 2, 0, 0.02, "float32", {})
    words = ["--add-zero-queries", "--block-size", "2"]
    assert cli.main(["convert", str(plain), str(tmp_path / "c"), *words]) == 0
    with pytest.raises(CheckpointError, match="family gemma2, which the reference model lacks; it"):
        attnres_serve.reference_model(tmp_path / "c")
