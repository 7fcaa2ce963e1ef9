"""A sequence through a worker's own modules, without its KV cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from attnres_serve.compat import decoder, engine_config


def untraceable(worker) -> str | None:
    """Why ``replay`` would not compute what this worker serves, in one sentence, or None."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    if engine_config.uses_lora(worker.vllm_config):
        return "there are no traces on a server with LoRA adapters; start one without them."
    other = "there are no traces of models whose attention is more than causal attention."
    layers, model = decoder.attention_layers(worker), decoder.of(decoder.inner_model(worker))
    if len(layers) != model.end_layer - model.start_layer:
        return other
    for layer in layers:
        if layer.kv_cache_torch_dtype != worker.vllm_config.model_config.dtype:
            return (
                f"there are no traces with --kv-cache-dtype {layer.kv_cache_dtype}, because they "
                "are computed without a KV cache; start the server without it."
            )
        plain = type(layer) is Attention and layer.attn_type == AttentionType.DECODER
        own = ("alibi_slopes", "logits_soft_cap", "sinks")
        shared = layer.kv_sharing_target_layer_name is not None
        more = [name for name in own if _is_set(getattr(layer.impl, name, None))]
        if not plain or shared or more:
            return other
    return None


def _is_set(value) -> bool:
    return value is not None and (not isinstance(value, float | int) or value != 0)


def replay(worker, ids: Sequence[int], attention: Callable) -> int:
    """Run a sequence through a worker's own modules: eager, alone, and without its KV cache.

    In chunks of ``max_num_batched_tokens``, the most for which vLLM has measured the memory.  What
    pipeline stages hand on goes through the host: the device's queue can hold messages of steps.

    Args:
        worker: vLLM's; every worker of an engine runs this at once.
        ids: the sequence.
        attention: from a layer's heads, key-value heads, scale and window makes the function that
            takes its place.

    Returns:
        The number of chunks.

    Raises:
        RuntimeError: another pipeline stage failed.
    """
    import torch
    from vllm.distributed import get_pp_group
    from vllm.forward_context import set_forward_context
    from vllm.sequence import IntermediateTensors

    stages, model = get_pp_group(), decoder.of(decoder.inner_model(worker))
    device = next(model.parameters()).device
    size = worker.vllm_config.scheduler_config.max_num_batched_tokens
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    failure: Exception | None = None
    done = 0
    with torch.inference_mode(), _attention_replaced(worker, attention):
        for chunk in chunks:  # to the end also after a failure: the other stages send and wait
            received, sent = None, {}
            if not stages.is_first_rank:
                tensors = stages.recv_tensor_dict()
                received = {name: tensor.to(device) for name, tensor in tensors.items()}
            try:
                if failure is not None or received == {}:
                    raise failure or RuntimeError("another pipeline stage failed.")
                positions = torch.arange(done, done + len(chunk), device=device)
                own = torch.tensor(chunk, device=device) if stages.is_first_rank else None
                before = None if received is None else IntermediateTensors(received)
                with set_forward_context(None, worker.vllm_config, skip_compiled=True):
                    found = model(own, positions, before)
                if not stages.is_last_rank:
                    sent = {name: tensor.cpu() for name, tensor in found.tensors.items()}
            except Exception as error:
                failure = error
            if not stages.is_last_rank:
                stages.send_tensor_dict(sent)
            done += len(chunk)
    if failure is not None:
        raise failure
    return len(chunks)


@contextmanager
def _attention_replaced(worker, attention: Callable) -> Iterator[None]:
    layers = decoder.attention_layers(worker)
    try:
        for layer in layers:
            heads = layer.num_heads, layer.num_kv_heads
            layer.forward = attention(*heads, layer.impl.scale, layer.sliding_window)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
