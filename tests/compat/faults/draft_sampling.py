"""docs/build/upstream/drafts-at-no-temperature.md"""

from types import SimpleNamespace
from typing import Any

import torch


def fault() -> bool:
    """Drafts are not divided by the temperature of their request."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    # With the functions that take the place of Triton's on a CPU.
    current_platform.import_kernels()
    if (override := current_platform.register_triton_kernel_overrides) is not None:
        override()
    else:  # vLLM 0.28
        CPUModelRunner._postprocess_triton(SimpleNamespace())
    logits, temperature = torch.randn(3, 8), torch.tensor([0.25])
    asked: Any = SimpleNamespace(all_greedy=False, temperature=temperature, top_k=None, top_p=None)
    drafts = torch.tensor([3], dtype=torch.int32)
    found = rejection_sampler.apply_sampling_constraints(logits.clone(), drafts, asked)
    return not torch.allclose(found, logits / temperature)
