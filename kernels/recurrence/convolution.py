"""The short causal convolution before a recurrence, and the inputs that it keeps."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, starts: Tensor, has_history: Tensor
) -> Tensor:
    """Mix each channel's last ``W`` inputs of the same sequence and apply SiLU.

    ``T`` tokens, ``C`` channels, ``W`` weights of a channel.

    Args:
        x: ``[T, C]`` in any float dtype; sums are float32 (float64 for float64).
        weight: ``[C, W]``; the last weight is for the token itself.
        state: the inputs before a sequence's next token, ``[blocks, C, W - 1]`` with any strides,
            written in place.
        slots, starts, has_history: as ``recurrence`` has them, padding too.

    Returns:
        ``[T, C]`` in the dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    before = weight.shape[1] - 1
    real = (slots > 0) & (starts.diff() > 0)
    blocks, begins, ends = slots[real].long(), starts[:-1][real].long(), starts[1:][real].long()
    lengths = ends - begins
    kept = state[blocks].to(wide)
    kept[~has_history[real]] = 0
    # All sequences in one line, each behind what it keeps: a token has its window before itself.
    number = torch.arange(len(blocks), device=x.device)
    tokens = torch.repeat_interleave(begins - lengths.cumsum(0) + lengths, lengths)
    tokens += torch.arange(len(tokens), device=x.device)
    lines = torch.repeat_interleave((number + 1) * before, lengths)
    lines += torch.arange(len(tokens), device=x.device)
    heads = lengths.cumsum(0) - lengths + number * before
    line = kept.new_empty(len(tokens) + len(blocks) * before, x.shape[1])
    line[heads[:, None] + torch.arange(before, device=x.device)] = kept.transpose(1, 2)
    line[lines] = x[tokens].to(wide)
    weights = weight.to(wide).t()
    mixed = line[lines] * weights[before]
    for back in range(1, before + 1):
        mixed += line[lines - back] * weights[before - back]
    out = torch.zeros_like(x)
    out[tokens] = silu(mixed).to(x.dtype)
    last = (heads + lengths)[:, None] + torch.arange(before, device=x.device)
    state[blocks] = line[last].transpose(1, 2).to(state.dtype)
    return out
