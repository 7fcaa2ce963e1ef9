"""The core of a delta-rule layer, KDA or Gated DeltaNet, from projections to the output.

One torch operator, opaque to a compiler like vLLM's: the batch and the cache come from vLLM's
forward context.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import direct_register_custom_op

from attnres_serve.kernels.recurrence import recurrence, short_convolution
from attnres_serve.model.linear_attention import batch

EPS = 1e-6  # epsilon of the norm of queries and keys, in every implementation


def attend(mixed: Tensor, decay: Tensor, beta: Tensor, value_dim: int, layer: str) -> Tensor:
    """Convolve, norm and run the recurrence.

    Args:
        mixed: ``[T, 2 G K + H V]``, the projections to queries, keys and values side by side.
        decay: ``[T, H, K]`` or ``[T, H, 1]`` float32.
        beta: ``[T, H]`` float32.
        value_dim: ``V``.
        layer: the layer's name in the forward context.  It has vLLM's ``kv_cache`` of a convolution
            and a recurrence, and ``conv_weight()`` ``[2 G K + H V, W]``.

    Returns:
        ``[T, H, V]`` in the dtype of ``mixed``; zeros where vLLM only profiles.
    """
    out: Tensor = torch.ops.vllm.attnres_delta_rule(mixed, decay, beta, value_dim, layer)
    return out


def _attend(mixed: Tensor, decay: Tensor, beta: Tensor, value_dim: int, layer: str) -> Tensor:
    module = batch.layer_of(layer)
    runs = batch.runs(layer)
    if runs and runs[0].tokens is None:
        return _run(module, mixed, decay, beta, value_dim, runs[0].batch)
    out = _empty(mixed, decay, beta, value_dim, layer).zero_()
    for tokens, before, sequences in runs:
        if before is not None:
            for cache in module.kv_cache:
                cache[sequences.slots.long()] = cache[before]
        run_inputs = mixed[tokens], decay[tokens], beta[tokens]
        out[tokens] = _run(module, *run_inputs, value_dim, sequences)
    return out


def _run(
    module: Any, mixed: Tensor, decay: Tensor, beta: Tensor, value_dim: int, sequences: batch.Batch
) -> Tensor:
    inputs, state = module.kv_cache
    if not is_conv_state_dim_first():
        inputs = inputs.transpose(-1, -2)
    weight = module.conv_weight()
    inputs = inputs[..., : weight.shape[1] - 1]  # those of drafts come after them
    values = beta.shape[1] * value_dim
    keys = (mixed.shape[1] - values) // 2
    mixed = short_convolution(mixed, weight, inputs, *sequences)
    q, k, v = mixed.split([keys, keys, values], dim=-1)
    key_dim = state.shape[-1]
    q, k = (_normed(x.unflatten(-1, (-1, key_dim))) for x in (q, k))
    v = v.unflatten(-1, (-1, value_dim))
    return recurrence(q, k, v, decay, beta, state, *sequences, key_dim**-0.5)


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def _empty(mixed: Tensor, decay: Tensor, beta: Tensor, value_dim: int, layer: str) -> Tensor:
    return mixed.new_empty((*beta.shape, value_dim))


direct_register_custom_op("attnres_delta_rule", _attend, fake_impl=_empty)
