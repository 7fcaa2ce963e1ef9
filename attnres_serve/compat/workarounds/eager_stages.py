"""What a pipeline stage receives, on CPU without compiled code.

vLLM 0.32 makes room for it in the dummy run that warms a model up, and a CPU has none where no
code is compiled.  The first request then ends every stage after the first one by an assertion.
"""

from typing import Any


def make_room() -> None:
    """Let a stage make room when it receives something and has none (idempotent)."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    receive = getattr(runner, "sync_and_gather_intermediate_tensors", None)
    if receive is None or getattr(receive, "makes_room", False):
        return

    def sync_and_gather_intermediate_tensors(self, *args, **options):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return receive(self, *args, **options)

    sync_and_gather_intermediate_tensors.makes_room = True  # type: ignore[attr-defined]
    runner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
