"""docs/build/upstream/draft-models-beside-two-caches.md"""

from types import SimpleNamespace
from typing import Any

import torch


def fault() -> bool:
    """A draft model whose layers are in the second group of caches gets the first one's blocks."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    drafter = DraftModelProposer.__new__(DraftModelProposer)
    drafter.kv_cache_gid = 1
    tables = [torch.tensor([[2, 3]], dtype=torch.int32), torch.tensor([[5, 6]], dtype=torch.int32)]
    slots = {number: table[0].long() for number, table in enumerate(tables)}
    _, found = GPUModelRunner._build_attention_metadata(
        runner(drafter, tables), num_tokens=2, num_reqs=1, max_query_len=2, slot_mappings=slots
    )
    assert found is not None
    return not (found.block_table_tensor.equal(tables[1]) and found.slot_mapping.equal(slots[1]))


def runner(drafter: Any, tables: list[torch.Tensor]) -> Any:
    """vLLM's, with a request of two tokens that has these blocks in each group of caches."""
    spans = torch.tensor([0, 2], dtype=torch.int32)
    both = SimpleNamespace(gpu=spans, cpu=spans)
    two, none = torch.tensor([2], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    return SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=False, kv_sharing_fast_prefill=False),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=None) for _ in tables]
        ),
        input_batch=SimpleNamespace(
            block_table=[
                SimpleNamespace(get_device_tensor=lambda count, table=table: table[:count])
                for table in tables
            ],
            num_computed_tokens_cpu_tensor=none,
            num_prompt_tokens_cpu_tensor=two,
        ),
        model_config=SimpleNamespace(rswa_window=None),
        optimistic_seq_lens_cpu=two,
        seq_lens=two,
        positions=torch.arange(2),
        query_start_loc=both,
        is_mm_prefix_lm=False,
        routed_experts_initialized=False,  # of vLLM 0.28, as the next
        use_async_spec_decode=False,
        dcp_world_size=1,
        speculative_config=object(),
        drafter=drafter,
        attn_groups=[[] for _ in tables],
        device=torch.device("cpu"),
        _get_encoder_seq_lens=lambda *_, **__: (None, None),
    )
