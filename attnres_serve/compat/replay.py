"""Running one sequence eagerly through a worker's modules, with separate caches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attnres_serve.compat import decoder, engine_config

NULL_BLOCKS = 1  # vLLM's block 0 is unused


def trace_problem(worker) -> str | None:
    """The reason why ``replay`` would differ from serving, in one sentence, or None."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    config = worker.vllm_config
    parallel = config.parallel_config
    if engine_config.uses_lora(config):
        return "there are no traces on a server with LoRA adapters; start one without them."
    if config.kv_transfer_config is not None:
        return (
            "there are no traces with --kv-transfer-config, because a KV connector would save what "
            "a trace computes; start the server without it."
        )
    if parallel.decode_context_parallel_size > 1:
        return (
            "there are no traces with --decode-context-parallel-size, because a worker has a part "
            "of the context only; start the server without it."
        )
    if parallel.data_parallel_size > 1 and parallel.is_moe_model:
        return (
            "there are no traces of a mixture of experts with --data-parallel-size, because its "
            "engines wait for each other; start the server without it."
        )
    layers = config.compilation_config.static_forward_context
    cached = {name for group in _groups(worker) for name in group.layer_names}
    if any(isinstance(layers[name], AttentionLayerBase) for name in layers.keys() - cached):
        return "there are no traces of models with attention that has no KV cache."
    return None


def replay(
    worker,
    ids: Sequence[int],
    at_end: Callable[[Any, int, Any], None] | None = None,
) -> int:
    """Run a sequence through a worker's modules, with their attention kernels.

    Chunks have at most as many tokens as vLLM has measured the memory for, and fewer than sharded
    sites need.  Pipeline stages exchange tensors through the host, because the device's queue may
    hold messages of steps.

    Args:
        worker: of vLLM; every worker of an engine runs this at the same time.
        ids: the sequence.
        at_end: called on the last stage with the model, the position of a chunk's first token, and
            the decoder's output for it, ``[T, d]``.

    Returns:
        The number of chunks.

    Raises:
        RuntimeError: another pipeline stage failed.
    """
    import torch
    from vllm.distributed import get_pp_group
    from vllm.forward_context import set_forward_context
    from vllm.sequence import IntermediateTensors

    stages, whole = get_pp_group(), decoder.inner_model(worker)
    model = decoder.of(whole)
    device = next(model.parameters()).device
    size = whole.attn_res_chunk
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    failure: Exception | None = None
    done = 0
    with torch.inference_mode(), _caches(worker, len(ids), device) as metadata:
        for chunk in chunks:  # to the end even after a failure: the other stages send and wait
            received, sent = None, {}
            if not stages.is_first_rank:
                tensors = stages.recv_tensor_dict()
                received = {name: tensor.to(device) for name, tensor in tensors.items()}
            try:
                if failure is not None or received == {}:
                    raise failure or RuntimeError("another pipeline stage failed.")
                positions = torch.arange(done, done + len(chunk), device=device)
                of_layers, slots = metadata(positions)
                token_ids = torch.tensor(chunk, device=device)
                before = None if received is None else IntermediateTensors(received)
                with set_forward_context(
                    of_layers,
                    worker.vllm_config,
                    num_tokens=len(positions),
                    slot_mapping=slots,
                    skip_compiled=True,
                ):
                    output = model(token_ids if stages.is_first_rank else None, positions, before)
                    if isinstance(output, tuple):  # with hidden states for EAGLE heads
                        output = output[0]
                    if at_end is not None and stages.is_last_rank:
                        at_end(whole, done, output)
                if not stages.is_last_rank:
                    sent = {name: tensor.cpu() for name, tensor in output.tensors.items()}
            except Exception as error:
                failure = error
            if not stages.is_last_rank:
                stages.send_tensor_dict(sent)
            done += len(chunk)
    if failure is not None:
        raise failure
    return len(chunks)


def _groups(worker) -> list[Any]:
    """vLLM's groups of layers with the same attention backend and kind of cache."""
    return [group for several in worker.model_runner.attn_groups for group in several]


@contextmanager
def _caches(worker, length: int, device) -> Iterator[Callable[[Any], tuple[dict, dict]]]:
    """Replace the layers' caches, which hold other requests, by caches for one sequence.

    Args:
        worker: of vLLM.
        length: tokens of the sequence.
        device: of the worker.

    Yields:
        A function of the positions of a chunk.  It gives the attention metadata and the slots of
        the chunk's tokens, both by the layer's name.
    """
    layers = worker.vllm_config.compilation_config.static_forward_context
    groups = _groups(worker)
    names = [name for group in groups for name in group.layer_names]
    kept = {name: layers[name].kv_cache for name in names}
    try:
        for group in groups:
            for name in group.layer_names:
                layers[name].kv_cache = _alike(group, kept[name], length)
        for name in names:
            shared = getattr(layers[name], "kv_sharing_target_layer_name", None)
            if shared is not None:
                layers[name].kv_cache = layers[shared].kv_cache
        yield lambda positions: _metadata(groups, positions, device)
    finally:
        for name, cache in kept.items():
            layers[name].kv_cache = cache


def _alike(group, cache, length: int) -> Any:
    """A cache like ``cache`` for one layer, with room for a sequence; a state has several parts."""
    import torch

    if isinstance(cache, tuple | list):
        return type(cache)(_alike(group, part, length) for part in cache)
    blocks = NULL_BLOCKS + _blocks(group, length)
    return torch.zeros_like(cache.narrow(_block_dim(group), 0, blocks))


def _block_dim(group) -> int:
    """The dimension of a cache that counts blocks; older vLLM versions ask the backend."""
    spec = _spec(group)
    if _is_state(group) or not hasattr(group.backend, "get_kv_cache_block_dim"):
        return 0
    return group.backend.get_kv_cache_block_dim(spec.block_size, spec.num_kv_heads, spec.head_size)


def _spec(group) -> Any:
    return group.metadata_builders[0].kv_cache_spec


def _is_state(group) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(_spec(group), MambaSpec)


def _blocks(group, length: int) -> int:
    """The number of blocks for a sequence: one for a state, several for keys and values."""
    return 1 if _is_state(group) else -(-length // _spec(group).block_size)


def _metadata(groups, positions, device) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    tokens, end = len(positions), int(positions[-1]) + 1
    ends = torch.tensor([end], dtype=torch.int32)
    begins = torch.tensor([0, tokens], dtype=torch.int32)
    metadata: dict[str, Any] = {}
    slots: dict[str, Any] = {}
    for group in groups:
        size = _spec(group).block_size
        table = NULL_BLOCKS + torch.arange(-(-end // size), dtype=torch.int32)[None]
        if _is_state(group):  # at any place where vLLM looks for it
            table = torch.full_like(table, NULL_BLOCKS)
        common = CommonAttentionMetadata(
            query_start_loc=begins.to(device),
            query_start_loc_cpu=begins,
            seq_lens=ends.to(device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=1,
            num_actual_tokens=tokens,
            max_query_len=tokens,
            max_seq_len=end,
            block_table_tensor=table.to(device),
            slot_mapping=NULL_BLOCKS * size + positions,
            positions=positions,
            is_prefilling=torch.tensor([True]),
        )
        built = group.metadata_builders[0].build(0, common)
        metadata |= dict.fromkeys(group.layer_names, built)
        slots |= dict.fromkeys(group.layer_names, common.slot_mapping)
    return metadata, slots
