"""Buffers for the input of pipeline stages, on CPU without compiled code.

vLLM 0.32 allocates them in the dummy run that warms a model up. On a CPU without compiled code
there is no such run, and the first request fails an assertion in every stage after the first.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _making_room(receive: Any) -> Any:
    """Allocate the buffers at the first input."""

    def sync_and_gather_intermediate_tensors(self, *args, **options):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return receive(self, *args, **options)

    return sync_and_gather_intermediate_tensors


PATCH = Patch(
    targets=(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.sync_and_gather_intermediate_tensors",
    ),
    make=_making_room,
    why="eager pipelines ended by an assertion",
    models="AttnRes models on CPU with `--pipeline-parallel-size`",
    first=(0, 28),
    report="eager-pipelines-on-cpu",
)
