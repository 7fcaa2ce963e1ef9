"""Requests with a ``seed`` whose prompt comes in several chunks, on CPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnres_serve.compat.workarounds import seeds_of_chunks

pytest.importorskip("vllm")

from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Runner:
    """vLLM's, which fails where a row that it discards has a generator."""

    def __init__(self, discarded: list[bool]) -> None:
        generators = {row: torch.Generator().manual_seed(row) for row in (0, 2)}
        self.input_batch = SimpleNamespace(num_reqs=3, generators=generators)
        # vLLM's mask has a place for every request that there may be.
        self.discard_request_mask = SimpleNamespace(np=np.array([*discarded, True, True]))

    def sample_tokens(self, grammar: Any) -> list[float | None]:
        rows = range(self.input_batch.num_reqs)
        generators = [self.input_batch.generators.get(row) for row in rows]
        for generator, is_discarded in zip(generators, self.discard_request_mask.np, strict=False):
            if generator is not None and is_discarded:
                generator.get_offset()
        return [None if one is None else torch.rand(1, generator=one).item() for one in generators]


def test_random_numbers_are_those_of_a_prompt_in_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", Runner.sample_tokens)
    seeds_of_chunks.PATCH.apply()
    step: Any = GPUModelRunner.sample_tokens
    whole = step(Runner([False] * 3), None)
    runner = Runner([True, True, False])
    assert step(runner, None) == [None, None, whole[2]]
    runner.discard_request_mask.np[:] = False
    assert step(runner, None)[:2] == whole[:2]


def test_a_step_that_fails_keeps_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, grammar: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", fails)
    seeds_of_chunks.PATCH.apply()
    runner: Any = Runner([True] * 3)
    with pytest.raises(RuntimeError, match="no memory"):
        GPUModelRunner.sample_tokens(runner, None)
    assert set(runner.input_batch.generators) == {0, 2}
