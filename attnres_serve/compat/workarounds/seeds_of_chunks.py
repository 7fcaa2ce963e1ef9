"""Requests with a ``seed`` whose prompt comes in several chunks, on CPU.

vLLM 0.32 samples a token for a chunk that is not the last, and takes its random numbers back by the
offset of the request's generator.  A generator of a CPU has none, so the engine ends.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _keeping_generators(original: Any) -> Any:
    """Keep a request's generator for its tokens; tokens to be discarded are sampled without one."""

    def sample_tokens(self, *args, **kwargs):
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {row: batch.generators.pop(row) for row in discarded if row in batch.generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            batch.generators.update(kept)

    return sample_tokens


PATCH = Patch(
    targets=("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",),
    make=_keeping_generators,
    why="a `seed` ended the engine where the prompt came in chunks",
    models="AttnRes models on CPU",
    first=(0, 28),
    report="seeds-of-chunks-on-cpu",
)
