"""Latent attention on CPU against float64, over a paged cache."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms import current_platform

from attnres_serve.compat import device
from attnres_serve.families import latent
from attnres_serve.model.latent_attention import KERNEL_BLOCK, Attention, Backend

if not device.is_cpu():
    pytest.skip("the kernels are those for CPUs", allow_module_level=True)

LENGTHS = (1, 16, 45, 130)  # tokens of the sequences: a block is not full, or just full
# Numbers are below four.  Sums of float32 are off by some hundred roundings of 2^-24 at most; in
# bfloat16 the answer is rounded by 2^-7, and rounded weights may move it by as much.
OFF = {torch.float32: 2e-5, torch.bfloat16: 2.5 * 2**-7}


def attention(rank: int, rotated: int, heads: int) -> Attention:
    sizes = {"qk_nope_head_dim": 24, "qk_head_dim": 24 + rotated, "v_head_dim": 24}
    row = {"kv_lora_rank": rank, "qk_rope_head_dim": rotated}
    usual = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap"))
    return Attention(
        **(usual | row | sizes),
        num_heads=heads,
        head_size=rank + rotated,
        scale=(24 + rotated) ** -0.5,
        num_kv_heads=1,
        kv_cache_dtype="auto",
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=None,
        kv_b_proj=None,
    )


@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize(
    ("rank", "rotated", "heads", "block"),
    [
        (*latent.COMPILED, 4, KERNEL_BLOCK),  # vLLM's kernel
        (128, 32, 12, KERNEL_BLOCK),
        (64, 64, 1, 3 * KERNEL_BLOCK),
        (600, 8, 5, KERNEL_BLOCK),
        (96, 0, 3, KERNEL_BLOCK),
        (544, 32, 2, KERNEL_BLOCK),  # of the kernel's size, and divided otherwise
    ],
)
def test_a_step_of_decoding_is_attention_to_the_cached_rows(
    rank: int, rotated: int, heads: int, block: int, dtype: torch.dtype
) -> None:
    current_platform.import_kernels()
    counts = [-(-tokens // block) for tokens in LENGTHS]
    numbers = torch.randperm(sum(counts) + 3)
    table = torch.full((len(LENGTHS), max(counts) + 1), int(numbers[-1]))
    cache = torch.full((len(numbers), block, rank + rotated), torch.nan, dtype=dtype)
    layer, all_rows, begin = attention(rank, rotated, heads), [], 0
    for sequence, (tokens, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        own = table[sequence, :count] = numbers[begin : begin + count]
        begin += count
        slots = (own[:, None] * block + torch.arange(block)).flatten()[:tokens]
        rows = torch.randn(tokens, rank + rotated).to(dtype)
        padded = torch.cat([slots, torch.tensor([-1])]), torch.cat([rows, rows[:1]])
        parts = padded[1][:, :rank], padded[1][:, None, rank:]
        layer.do_kv_cache_update(*parts, cache, padded[0], "auto", torch.ones(()))
        all_rows.append(rows.double())
    queries = torch.randn(len(LENGTHS), heads, rank + rotated).to(dtype)
    decode = SimpleNamespace(block_table=table, seq_lens=torch.tensor(LENGTHS))
    given = queries.split([rank, rotated], dim=-1)
    found, _ = layer.forward_mqa(given, cache, SimpleNamespace(decode=decode), None)
    for answer, query, rows in zip(found, queries.double(), all_rows, strict=True):
        weights = (query @ rows.T * layer.scale).softmax(-1)
        assert (answer - weights @ rows[:, :rank]).abs().max() < OFF[dtype]


def test_blocks_are_multiples_of_the_kernels() -> None:
    """A hybrid model's block is 128 tokens or more."""
    accepted = [b for b in (None, 16, 24, 128, 144, 200) if Backend.supports_block_size(b)]
    assert accepted == [None, 16, 128, 144]
    assert Backend.get_supported_kernel_block_sizes() == [KERNEL_BLOCK]
