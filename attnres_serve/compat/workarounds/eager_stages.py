"""What a pipeline stage receives, on CPU without compiled code.

vLLM 0.32 makes room for it in the dummy run that warms a model up, and a CPU has none where no
code is compiled.  The first request then ends every stage after the first one by an assertion.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _making_room(receive: Any) -> Any:
    """Let a stage make room when it receives something and has none."""

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
