"""docs/build/upstream/no-token-left.md"""

from types import SimpleNamespace
from typing import Any

import torch


def fault() -> bool:
    """Where every logit is masked, a token is sampled, and the scheduler keeps it."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.sample.sampler import Sampler

    current_platform.import_kernels()
    tokens = Sampler.greedy_sample(torch.full((1, 16), float("-inf"))).tolist()
    params = SamplingParams(max_tokens=10, allowed_token_ids=[5])
    request = Request("name", [3], params, None)
    config = SimpleNamespace(hf_config=SimpleNamespace(attn_res_config={}))
    scheduler: Any = SimpleNamespace(
        max_model_len=64,
        structured_output_manager=None,
        vllm_config=SimpleNamespace(model_config=config),
    )
    Scheduler._update_request_with_output(scheduler, request, tokens)
    return any(token not in (5, -1) for token in request.output_token_ids)
